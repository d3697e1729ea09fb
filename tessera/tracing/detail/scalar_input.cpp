#include "tessera/tracing/detail/scalar_input.h"

#include "tessera/tracing/detail/compiling_scope.h"

#include <cmath>
#include <utility>
#include <vector>

namespace tessera {
namespace {

// Placeholder n: a double between one and two that no program contains by chance. Steps of 2^-44 are exact, so
// placeholders are distinct.
double placeholder(size_t n) { return 1.368498496013111 + std::ldexp(static_cast<double>(n), -44); }

// The scalar inputs of the step that this thread traces.
struct TracedInputs {
  size_t scope = 0;
  std::vector<ScalarInput> inputs;
};
TracedInputs& traced_inputs() {
  thread_local TracedInputs it;
  if (it.scope != CompilingScope::serial()) it = {CompilingScope::serial(), {}};
  return it;
}

}  // namespace

double scalar_input(const char* name, std::function<double()> read) {
  if (!compiling()) return read();
  auto& inputs = traced_inputs().inputs;
  inputs.push_back({name, std::move(read)});
  return placeholder(inputs.size() - 1);
}

std::optional<ScalarInput> find_scalar_input(double value) {
  if (!compiling()) return {};
  const auto& inputs = traced_inputs().inputs;
  for (size_t n = 0; n < inputs.size(); n++)
    if (value == placeholder(n)) return inputs[n];
  return {};
}

}  // namespace tessera
