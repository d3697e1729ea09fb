#pragma once
#include <optional>
#include <string>

// Results that take long to find, one file each in the kernel cache: NAME.bin, where NAME is the MAC of the key. A file
// is trusted as a built library is: only this user can write it, and a MAC of its name and bytes follows them.
// The CUDA layer keeps compiled kernels and chosen algorithms here (cuda/detail/result_cache.h).
namespace tessera::compiler::codegen {

// None if the file is missing, or if it is refused, with a warning.
std::optional<std::string> read_result(const std::string& key);
// A folder that cannot be used is one warning: the next process finds the result anew.
void write_result(const std::string& key, const std::string& result);

}  // namespace tessera::compiler::codegen
