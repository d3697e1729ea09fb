#include "tessera/testing/detail/rank_generator.h"

#include "tessera/base/error.h"

#include <ATen/CPUGeneratorImpl.h>
#include <dlfcn.h>

#include <optional>

namespace tessera::testing {
namespace {

thread_local std::optional<at::Generator> generator_of_rank;

}  // namespace

RankGeneratorScope::RankGeneratorScope(uint64_t seed) {
  generator_of_rank = at::make_generator<at::CPUGeneratorImpl>(seed);
}
RankGeneratorScope::~RankGeneratorScope() { generator_of_rank.reset(); }

}  // namespace tessera::testing

// LibTorch asks this function of its own for the default generator, through the dynamic linker, which takes the one of
// the program first. LibTorch's other ways to a generator (torch::manual_seed, kernels, states) all end here.
const at::Generator& at::detail::getDefaultCPUGenerator() {
  using tessera::testing::generator_of_rank;
  if (generator_of_rank) return *generator_of_rank;
  using Function = const at::Generator& (*)();
  static const auto of_libtorch =
      reinterpret_cast<Function>(dlsym(RTLD_NEXT, "_ZN2at6detail22getDefaultCPUGeneratorEv"));
  TESSERA_CHECK(of_libtorch, InternalError, "LibTorch has no at::detail::getDefaultCPUGenerator()");
  return of_libtorch();
}
