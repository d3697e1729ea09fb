#pragma once
#include "tessera/compile/detail/api/compile_settings.h"

#include <functional>
#include <memory>
#include <vector>

namespace tessera::compiler {

// The last stages of compilation: passes, lowering, executable.
//   name              of the program in reports: "step", "forward", "backward", "backward_weights"
//   report            the entries of all passes are appended
//   bind              gives the storages of the lowered program, by buffer (see Executable)
//   before_lowering   if not null, gets the program after the passes
// Throws UsageError on all ranks if their programs post different collectives, or if a rank could not compile.
std::unique_ptr<Executable> build_executable(Program program, const char* name, const Settings& settings,
                                             std::vector<PassReport>& report,
                                             const std::function<std::vector<c10::Storage>(const Program&)>& bind,
                                             Program* before_lowering = nullptr);

// Of the storages of a trace, by buffer, those that the program shares with its environment: storages of inputs, and of
// outputs other than returned ones. The executable allocates all others.
std::vector<c10::Storage> shared_storages(const Program& program, std::vector<c10::Storage> traced);

}  // namespace tessera::compiler
