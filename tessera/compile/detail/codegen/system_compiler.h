#pragma once
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler::codegen {

// The C++ compiler of this machine, which builds generated kernels.
struct SystemCompiler {
  std::vector<std::string> command;  // executable and flags
  std::string identity;              // version, flags and processor: with the source they determine the output
};

// The first of $CXX, c++, g++, clang++ that runs; nullopt if none does. Cached per CXX and PATH.
std::optional<SystemCompiler> find_compiler();
inline bool compiler_available() { return find_compiler().has_value(); }

// Model and features of the processor, on which -march=native depends.
std::string processor_model();

// Builds a shared library. UsageError with the compiler's output if that fails.
void build_shared_library(const SystemCompiler& compiler, const std::string& source_file,
                          const std::string& library_file);

}  // namespace tessera::compiler::codegen
