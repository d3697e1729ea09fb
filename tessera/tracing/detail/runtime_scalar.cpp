#include "tessera/tracing/detail/runtime_scalar.h"

#include "tessera/tracing/detail/compiling_scope.h"

#include <cmath>
#include <utility>
#include <vector>

namespace tessera {
namespace {

// Placeholder n: a double between one and two that no program contains by chance. Steps of 2^-44 are exact, so
// placeholders are distinct.
double placeholder(size_t n) { return 1.368498496013111 + std::ldexp(static_cast<double>(n), -44); }

// The runtime scalars of the step that this thread traces.
struct TracedScalars {
  size_t scope = 0;
  std::vector<RuntimeScalarSource> scalars;
};
TracedScalars& traced_scalars() {
  thread_local TracedScalars it;
  if (it.scope != CompilingScope::serial()) it = {CompilingScope::serial(), {}};
  return it;
}

}  // namespace

double runtime_scalar(const char* name, std::function<double()> read) {
  if (!compiling()) return read();
  auto& scalars = traced_scalars().scalars;
  scalars.push_back({name, std::move(read)});
  return placeholder(scalars.size() - 1);
}

std::optional<RuntimeScalarSource> find_runtime_scalar(double value) {
  if (!compiling()) return {};
  const auto& scalars = traced_scalars().scalars;
  for (size_t n = 0; n < scalars.size(); n++)
    if (value == placeholder(n)) return scalars[n];
  return {};
}

}  // namespace tessera
