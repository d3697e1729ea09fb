#include "fuzz_targets.h"

#include <c10/util/Logging.h>

namespace tessera::fuzz {
namespace {

constexpr FuzzTarget kTargets[] = {
    {"distcp", fuzz_distcp},
    {"ir", fuzz_ir},
    {"json", fuzz_json},
    {"manifest", fuzz_manifest},
    {"mesh", fuzz_mesh},
    {"placement", fuzz_placement},
    {"plan", fuzz_plan},
    {"safetensors", fuzz_safetensors},
    {"schedule", fuzz_schedule},
    {"store_wire", fuzz_store_wire},
    {"token_file", fuzz_token_file},
    {"toml", fuzz_toml},
    {"torch_archive", fuzz_torch_archive},
};

}  // namespace

std::span<const FuzzTarget> fuzz_targets() { return kTargets; }

void leave_out_backtraces() {
  c10::SetStackTraceFetcher([] { return std::string(); });
}

}  // namespace tessera::fuzz
