#pragma once
#include <functional>
#include <optional>

namespace tessera {

// A scalar that each run of a compiled program reads again, such as the learning rate.
struct RuntimeScalarSource {
  const char* name;
  std::function<double()> read;
};

// Outside tracing it gives read(). While a step is traced it gives a placeholder: a double that no program uses for
// anything else. If the compiler finds the placeholder or its negative among the arguments of an op, it replaces it by
// the value of read() in each run. Pass the value to the op unchanged: arithmetic on it would become a constant of the
// program.
//
//   at::_foreach_add_(params, grads, -runtime_scalar("lr", [this] { return lr_; }));
double runtime_scalar(const char* name, std::function<double()> read);

// The source of a placeholder, or nothing for an ordinary number. For the compiler, within its CompilingScope.
std::optional<RuntimeScalarSource> find_runtime_scalar(double value);

}  // namespace tessera
