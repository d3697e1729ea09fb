#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>

// Generated kernels, built and loaded.
//
//   Program::kernels --> one source --> <cache>/<hash>.so --> functions and counts of their calls
//
// The hash is of all that the file depends on: source, compiler, flags, processor. A file that is there is used, if the
// checksum at its end holds; one that is damaged is built anew, which is said. Files appear under their name only when
// they are whole, so that many processes can share a folder.
namespace tessera::compiler::codegen {

// Computes part `part` of `parts`; operands are the memory of what it writes and then of what it only reads.
using Function = void (*)(void* const* operands, int64_t part, int64_t parts);

class Library {
 public:
  // name -> source of a function `void name(void* const* operands, int64_t part, int64_t parts)` that counts its calls
  // in `int64_t name_calls`.
  using Kernels = std::map<std::string, std::string>;

  // From this process, from disk, or built. UsageError if there is no compiler, it fails, or there is no folder to
  // write to.
  static std::shared_ptr<const Library> load(const Kernels& kernels);
  ~Library();
  Library(const Library&) = delete;

  Function function(const std::string& name) const;  // InternalError for one that is not there
  int64_t calls(const std::string& name) const;      // so far, of all threads
  const std::string& path() const { return path_; }

  static int64_t builds();  // how often this process has run the compiler

 private:
  struct Symbol {
    Function function;
    const int64_t* calls;
  };
  Library(std::string path, void* handle) : path_(std::move(path)), handle_(handle) {}
  static std::shared_ptr<const Library> open(const std::string& path, const Kernels& kernels);
  const Symbol& symbol(const std::string& name) const;

  std::string path_;
  void* handle_;
  std::map<std::string, Symbol> symbols_;
};

}  // namespace tessera::compiler::codegen
