#pragma once
#include <functional>
#include <optional>

namespace tessera {

// A scalar input of a compiled program: a number, such as the learning rate, that each run of the program reads again.
struct ScalarInput {
  const char* name;
  std::function<double()> read;
};

// Outside tracing it gives read(). While a step is traced it gives a placeholder: a double that no program uses for
// anything else. If the compiler finds the placeholder or its negative among the arguments of an op, it replaces it by
// the value of read() in each run. Pass the value to the op unchanged: arithmetic on it would become a constant of the
// program.
//
//   at::_foreach_add_(params, grads, -scalar_input("lr", [this] { return lr_; }));
double scalar_input(const char* name, std::function<double()> read);

// The scalar input of a placeholder, or nothing for an ordinary number. For the compiler, within its CompilingScope.
std::optional<ScalarInput> find_scalar_input(double value);

}  // namespace tessera
