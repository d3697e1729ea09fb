#pragma once
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler::codegen {

// The C++ compiler of this machine, with which generated kernels are built.
struct SystemCompiler {
  std::vector<std::string> command;  // itself and the flags
  std::string identity;              // what its output depends on beside the source: version, flags, processor
};

// $CXX, c++, g++, clang++: the first that is there and answers. Looked for once for each CXX and PATH.
std::optional<SystemCompiler> find_compiler();
inline bool available() { return find_compiler().has_value(); }

// Builds a shared library. UsageError with the compiler's words if it does not.
void build(const SystemCompiler& compiler, const std::string& source_file, const std::string& library_file);

}  // namespace tessera::compiler::codegen
