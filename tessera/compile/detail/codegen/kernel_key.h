#pragma once
#include <string>

// The secret of this user that authenticates built kernels. It is in a file of its own, outside of the cache:
// $XDG_STATE_HOME/tessera/kernel_key, or ~/.local/state/tessera/kernel_key, 32 random bytes with mode 0600. It is
// created on first use. Without it nobody can make a file that is loaded as a kernel, even where a cache folder was
// writable for others, or was copied from another machine.
namespace tessera::compiler::codegen {

class KernelKey {
 public:
  // Reads or creates the key. UsageError if that fails, or if others could write it (private_files.h).
  static KernelKey of_user();

  // HMAC-SHA256 of the bytes under this key, 64 hexadecimal digits.
  std::string mac(const std::string& bytes) const;
  static constexpr size_t kMacDigits = 64;

 private:
  explicit KernelKey(std::string secret) : secret_(std::move(secret)) {}
  std::string secret_;
};

}  // namespace tessera::compiler::codegen
