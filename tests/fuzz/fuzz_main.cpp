// The program of the fuzzers, with libFuzzer's main:  tessera_fuzz --target=json [libFuzzer's flags] CORPUS...
#include "fuzz_targets.h"

#include <cstdio>
#include <cstdlib>

namespace {

const tessera::fuzz::FuzzTarget* chosen_target = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  tessera::fuzz::leave_out_backtraces();
  constexpr std::string_view kFlag = "--target=";
  for (int i = 1; i < *argc; i++) {
    const std::string_view argument = (*argv)[i];
    for (const auto& target : tessera::fuzz::fuzz_targets())
      if (argument.starts_with(kFlag) && argument.substr(kFlag.size()) == target.name) chosen_target = &target;
  }
  if (chosen_target) return 0;
  std::fputs("write --target=NAME with one of", stderr);
  for (const auto& target : tessera::fuzz::fuzz_targets()) std::fprintf(stderr, " %s", target.name);
  std::fputs("\n", stderr);
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    chosen_target->run({reinterpret_cast<const char*>(data), size});
  } catch (const std::exception& error) {  // libFuzzer saves the input when the process aborts
    std::fprintf(stderr, "finding: %s\n", error.what());
    std::abort();
  }
  return 0;
}
