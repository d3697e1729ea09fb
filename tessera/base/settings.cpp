#include "tessera/base/settings.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace tessera {
namespace {

// Sorted by name; what launchers set first, then our own.
constexpr Setting kSettings[] = {
    {"CUDA_VISIBLE_DEVICES", "", "CUDA devices this rank may use; ranks that see the same ones share them out"},
    {"LOCAL_RANK", "", "place among the ranks of this machine; set by torchrun and tessera run"},
    {"MASTER_ADDR", "127.0.0.1", "where rank 0 listens for env:// rendezvous"},
    {"MASTER_PORT", "29500", "the port of it"},
    {"RANK", "", "this rank, for env://; set by torchrun and tessera run"},
    {"TORCHELASTIC_USE_AGENT_STORE", "", "True: torchrun keeps the store of env:// itself"},
    {"WORLD_SIZE", "", "number of ranks, for env://"},
    {"TESSERA_BACKEND", "auto",
     "backend when init() names none: auto, threads, shm, gloo, nccl, fake, or a registered one"},
    {"TESSERA_BENCH_ROWS", "", "set in the children of tessera bench: the file for what they measured"},
    {"TESSERA_GLOO_HOST", "", "host name or address whose interface gloo uses; empty: gloo's own choice"},
    {"TESSERA_PEERS", "", "tessera bench: folder of the peer scripts; empty: benchmarks/peers of the source tree"},
    {"TESSERA_PYTHON", "", "tessera bench: the Python that runs peers; empty: .venv/bin/python, then python3"},
    {"TESSERA_SLOT_BYTES", "16384", "shm, threads: a collective of up to so many bytes a rank travels whole"},
    {"TESSERA_SOAK", "", "tests: 1 runs the long forms"},
    {"TESSERA_SPAWN", "", "set in the children of spawn_ranks: which call, rank, ranks and rendezvous file"},
    {"TESSERA_STAGE_BYTES", "262144", "shm, threads: bytes of a chunk of a larger one; a rank has four"},
    {"TESSERA_TIMEOUT_S", "600", "seconds a collective may wait for a peer when init() says nothing"},
};

const Setting& row(std::string_view name) {
  for (const Setting& s : kSettings)
    if (name == s.name) return s;
  TESSERA_FAIL(InternalError, "setting '", name, "' has no row in base/settings.cpp");
}

template <class T>
T parse(std::string_view name) {
  std::string text = setting(name);
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TESSERA_CHECK(error == std::errc() && end == text.data() + text.size(), UsageError, "environment variable ", name,
                " is '", text, "', which is no number");
  return value;
}

}  // namespace

std::span<const Setting> all_settings() { return kSettings; }

std::string setting(std::string_view name) {
  const Setting& s = row(name);
  const char* value = std::getenv(s.name);
  return value && *value ? value : s.fallback;
}

int64_t setting_int(std::string_view name) { return parse<int64_t>(name); }
double setting_number(std::string_view name) { return parse<double>(name); }

bool setting_is_set(std::string_view name) {
  const char* value = std::getenv(row(name).name);
  return value && *value;
}

}  // namespace tessera
