#pragma once
#include <functional>
#include <optional>

namespace tessera {

// A number that a compiled step reads anew each time it runs, a learning rate say. While a step is compiled this gives
// a double that stands for it and for nothing else: the compiler finds it, or its negative, among the arguments of ops,
// and puts what `read` gives in its place at every run. Pass it on as it is: arithmetic on it would be part of the
// program. Otherwise it gives read().
double live_number(const char* name, std::function<double()> read);

struct LiveNumber {
  const char* name;
  std::function<double()> read;
};
// What a double stands for; nothing, for an ordinary one. For the compiler, within its CompilingScope.
std::optional<LiveNumber> live_number_behind(double value);

}  // namespace tessera
