#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>

// Builds and loads generated kernels, with a cache on disk.
//
//   Program::kernels --> one source file --> <cache>/<hash>.so --> functions, and a call counter for each
//
// The hash covers source, compiler, flags, processor and the user's key (kernel_key.h). A file is code of this user
// only if nobody else could write it (private_files.h) and if it ends with the MAC of its name and bytes under that
// key. Any other file of that name is rebuilt, with a warning. A cache folder that others can write is not used:
// UsageError. A file is built in a folder of its own and then renamed, so that processes can share a cache folder; one
// process builds at a time. The folder is bounded (TESSERA_CACHE_MB).
namespace tessera::compiler::codegen {

class KernelKey;

// TESSERA_CACHE_DIR, or `tessera` in the user's cache folder. It may not exist. UsageError if the user has none.
std::string kernel_cache_folder();
// Deletes the libraries, sources and results that were used longest ago, until the folder is within its bound. A
// process that has a library loaded keeps it. `kept`: the file that was just made.
void delete_least_used(const std::string& folder, const std::string& kept);

// A generated kernel. Computes part `part` of `parts` of all elements. `operands`: addresses of the written tensors,
// then of those that are only read.
using KernelFunction = void (*)(void* const* operands, int64_t part, int64_t parts);

// A loaded shared library with the kernels of one program.
class KernelLibrary {
 public:
  // Name -> C++ source of `void name(void* const* operands, int64_t part, int64_t parts)`, which counts its calls in
  // `int64_t name_calls`.
  using Kernels = std::map<std::string, std::string>;

  // Reuses a library that this process has loaded, or loads one from the disk cache, or builds it. UsageError without a
  // compiler, if the compiler fails, or if the cache folder cannot be written or others can write it.
  static std::shared_ptr<const KernelLibrary> load(const Kernels& kernels);
  // Loads a library from memory: the bytes that built_bytes() has returned. The caller knows that they are code of this
  // user. UsageError if they cannot be loaded, or do not define the kernels.
  static std::shared_ptr<const KernelLibrary> load_built(const std::string& bytes, const Kernels& kernels);
  // The file as the compiler has made it, without the MAC. UsageError if it was deleted from the cache.
  std::string built_bytes() const;
  ~KernelLibrary();
  KernelLibrary(const KernelLibrary&) = delete;

  KernelFunction function(const std::string& name) const;  // InternalError if the name is unknown
  int64_t calls(const std::string& name) const;            // of this function so far, by all threads
  const std::string& path() const { return path_; }

  static int64_t builds();  // how often this process has run the compiler

 private:
  struct Symbol {
    KernelFunction function;
    const int64_t* calls;
  };
  KernelLibrary(std::string path, void* handle) : path_(std::move(path)), handle_(handle) {}
  static std::shared_ptr<const KernelLibrary> open(const std::string& path, const KernelKey& key,
                                                   const Kernels& kernels);
  const Symbol& symbol(const std::string& name) const;

  static std::shared_ptr<KernelLibrary> open_library(const std::string& path, const Kernels& kernels,
                                                     std::string& error);

  std::string path_;
  std::string bytes_ = {};  // of a library that was loaded from memory
  int file_ = -1;           // its memory; open while it is loaded, because the loader compares paths
  void* handle_;
  std::map<std::string, Symbol> symbols_;
};

}  // namespace tessera::compiler::codegen
