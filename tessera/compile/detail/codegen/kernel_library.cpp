#include "tessera/compile/detail/codegen/kernel_library.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/detail/warn_once.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/kernel_key.h"
#include "tessera/compile/detail/codegen/private_files.h"
#include "tessera/compile/detail/codegen/system_compiler.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>

namespace fs = std::filesystem;

namespace tessera::compiler::codegen {
namespace {

std::atomic<int64_t> builds_of_process{0};

}  // namespace

std::string kernel_cache_folder() {
  if (setting_is_set("TESSERA_CACHE_DIR")) return setting("TESSERA_CACHE_DIR");
  if (setting_is_set("XDG_CACHE_HOME")) return fs::path(setting("XDG_CACHE_HOME")) / "tessera";
  TESSERA_CHECK(setting_is_set("HOME"), UsageError,
                "codegen: generated kernels need a cache folder; set TESSERA_CACHE_DIR, XDG_CACHE_HOME or HOME");
  return fs::path(setting("HOME")) / ".cache" / "tessera";
}

void delete_least_used(const std::string& folder, const std::string& kept) {
  struct CachedFile {
    fs::file_time_type used;
    fs::path path;
    int64_t bytes;
  };
  std::vector<CachedFile> files;
  int64_t total = 0;
  std::error_code failed;  // files may disappear: other processes delete too
  for (const auto& entry : fs::directory_iterator(folder, failed)) {
    const auto extension = entry.path().extension();
    if (extension != ".so" && extension != ".cpp" && extension != ".bin") continue;
    const CachedFile file{entry.last_write_time(failed), entry.path(), static_cast<int64_t>(entry.file_size(failed))};
    if (failed) continue;
    files.push_back(file);
    total += file.bytes;
  }
  std::sort(files.begin(), files.end(), [](const CachedFile& a, const CachedFile& b) { return a.used < b.used; });
  const auto bound = setting_int("TESSERA_CACHE_MB") * 1'000'000;
  for (const auto& file : files) {
    if (total <= bound) break;
    if (file.path.stem() == fs::path(kept).stem()) continue;
    fs::remove(file.path, failed);
    total -= file.bytes;
  }
}

namespace {

std::string source_file_of(const KernelLibrary::Kernels& kernels) {
  std::string text = "#include <cmath>\n#include <cstdint>\nextern \"C\" {\n";
  for (const auto& [name, source] : kernels) text += "\n" + source;
  return text + "\n}\n";
}

// A folder inside of the cache folder in which one library is built. Nobody else can reach into it, so the compiler may
// create files with any mode. It is deleted at the end.
class BuildFolder {
 public:
  explicit BuildFolder(const fs::path& cache) : path_((cache / "build.XXXXXX").string()) {
    TESSERA_CHECK(mkdtemp(path_.data()), UsageError, "codegen: cannot create a folder in ", cache.string(), ": ",
                  std::strerror(errno), "; set TESSERA_CACHE_DIR to a folder that can be written");
  }
  ~BuildFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  BuildFolder(const BuildFolder&) = delete;
  std::string file(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// While it is alive, no other process builds a library in this folder: of many that start together, one builds and the
// others wait. The lock ends with its process. Without it, on a file system without locks, each process builds.
class BuildLock {
 public:
  explicit BuildLock(const std::string& folder)
      : file_(::open((folder + "/lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600)) {
    while (file_ >= 0 && flock(file_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~BuildLock() {
    if (file_ >= 0) close(file_);
  }
  BuildLock(const BuildLock&) = delete;

 private:
  int file_;
};

void rename_file(const std::string& from, const fs::path& to) {
  std::error_code failed;
  fs::rename(from, to, failed);
  TESSERA_CHECK(!failed, UsageError, "codegen: cannot rename ", from, " to ", to.string(), ": ", failed.message());
}

// The name is part of the message: a file of another kernel is not accepted under this name.
std::string mac_of_library(const KernelKey& key, const fs::path& path, const std::string& bytes) {
  return key.mac(path.filename().string() + '\0' + bytes);
}

void build_library_file(const SystemCompiler& compiler, const KernelKey& key, const std::string& source,
                        const fs::path& path) {
  const BuildFolder folder(path.parent_path());
  const auto source_file = folder.file("kernels.cpp"), built = folder.file("built.so"), file = folder.file("file.so");
  write_private_file(source_file, source);
  builds_of_process++;
  build_shared_library(compiler, source_file, built);
  std::ifstream in(built, std::ios::binary);
  TESSERA_CHECK(in, UsageError, "codegen: ", compiler.command[0], " did not write ", built);
  const std::string bytes(std::istreambuf_iterator<char>(in), {});
  write_private_file(file, bytes + mac_of_library(key, path, bytes));  // dlopen ignores what follows the library
  auto source_path = path;
  rename_file(source_file, source_path.replace_extension(".cpp"));  // for people who want to read it
  rename_file(file, path);
  delete_least_used(path.parent_path().string(), path.string());
}

bool has_valid_mac(const KernelKey& key, const fs::path& path, const std::string& bytes) {
  if (bytes.size() <= KernelKey::kMacDigits) return false;
  const auto end = bytes.size() - KernelKey::kMacDigits;
  return mac_of_library(key, path, bytes.substr(0, end)) == bytes.substr(end);
}

}  // namespace

KernelLibrary::~KernelLibrary() {
  dlclose(handle_);
  if (file_ >= 0) close(file_);
}

int64_t KernelLibrary::builds() { return builds_of_process; }

std::shared_ptr<const KernelLibrary> KernelLibrary::load(const Kernels& kernels) {
  const auto compiler = find_compiler();
  TESSERA_CHECK(compiler, UsageError, "codegen: found no C++ compiler; CXX is \"", setting("CXX"),
                "\", and c++, g++ and clang++ are not in PATH");
  const auto source = source_file_of(kernels);
  const auto key = KernelKey::of_user();
  const auto folder = private_folder(kernel_cache_folder(), "codegen: the kernel cache folder");
  const auto path = folder + "/" + key.mac(compiler->identity + source) + ".so";

  // Ranks can be threads: the first one builds, the others wait and share the result.
  static std::mutex mutex;
  static auto* loaded = new std::map<std::string, std::weak_ptr<const KernelLibrary>>;  // by path
  const std::lock_guard lock(mutex);
  auto& here = (*loaded)[path];
  auto library = here.lock();
  if (!library) library = open(path, key, kernels);
  if (!library) {
    const BuildLock build_lock(folder);
    library = open(path, key, kernels);  // another process may have built it meanwhile
    if (!library) {
      build_library_file(*compiler, key, source, path);
      library = open(path, key, kernels);
    }
    TESSERA_CHECK(library, InternalError, "codegen: ", path,
                  " cannot be loaded although it was just built; please report this");
  }
  here = library;
  return library;
}

// Null if the file does not exist, is damaged, or could have been written by another user.
std::shared_ptr<const KernelLibrary> KernelLibrary::open(const std::string& path, const KernelKey& key,
                                                         const Kernels& kernels) {
  const auto file = read_private_file(path);
  if (!file.bytes && file.refused.empty()) return {};
  const auto damaged = [&](const std::string& how) {
    warn_once("codegen/" + path, c10::str("codegen: ", path, " is damaged (", how, "); it is rebuilt"));
    return nullptr;
  };
  if (!file.bytes) return damaged(file.refused);
  if (!has_valid_mac(key, path, *file.bytes)) return damaged("its checksum does not match");
  std::string error;
  auto library = open_library(path, kernels, error);
  if (!library) return damaged(error);
  utimensat(AT_FDCWD, path.c_str(), nullptr, 0);  // it was used now
  return library;
}

// Null and an error if the library cannot be loaded, or does not define the kernels.
std::shared_ptr<KernelLibrary> KernelLibrary::open_library(const std::string& path, const Kernels& kernels,
                                                           std::string& error) {
  auto* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    error = dlerror();
    return nullptr;
  }
  std::shared_ptr<KernelLibrary> library(new KernelLibrary(path, handle));
  for (const auto& [name, source] : kernels) {
    auto* function = dlsym(handle, name.c_str());
    auto* calls = dlsym(handle, (name + "_calls").c_str());
    if (!function || !calls) {
      error = "it does not define " + name;
      return nullptr;
    }
    library->symbols_[name] = {reinterpret_cast<KernelFunction>(function), static_cast<const int64_t*>(calls)};
  }
  return library;
}

// The loader reads the bytes from memory without a name: nobody can exchange them after they were checked.
std::shared_ptr<const KernelLibrary> KernelLibrary::load_built(const std::string& bytes, const Kernels& kernels) {
  const auto file = memfd_create("tessera kernels", MFD_CLOEXEC);
  TESSERA_CHECK(file >= 0, UsageError, "load: cannot allocate memory for built kernels: ", std::strerror(errno));
  size_t written = 0;
  for (ssize_t n = 1; written < bytes.size() && n > 0; written += static_cast<size_t>(std::max<ssize_t>(n, 0)))
    n = write(file, bytes.data() + written, bytes.size() - written);
  std::string error = std::strerror(errno);
  std::shared_ptr<KernelLibrary> library;
  if (written == bytes.size()) library = open_library(c10::str("/proc/self/fd/", file), kernels, error);
  if (!library) close(file);
  TESSERA_CHECK(library, UsageError, "load: the built kernels cannot be loaded: ", error);
  library->bytes_ = bytes;
  library->file_ = file;
  return library;
}

std::string KernelLibrary::built_bytes() const {
  if (!bytes_.empty()) return bytes_;
  const auto file = read_private_file(path_);
  TESSERA_CHECK(file.bytes && has_valid_mac(KernelKey::of_user(), path_, *file.bytes), UsageError, "save: ", path_,
                ", which has the kernels of the program, was deleted or changed; compile the step again");
  return file.bytes->substr(0, file.bytes->size() - KernelKey::kMacDigits);
}

const KernelLibrary::Symbol& KernelLibrary::symbol(const std::string& name) const {
  const auto found = symbols_.find(name);
  TESSERA_CHECK(found != symbols_.end(), InternalError, "codegen: ", path_, " does not define ", name);
  return found->second;
}

KernelFunction KernelLibrary::function(const std::string& name) const { return symbol(name).function; }
int64_t KernelLibrary::calls(const std::string& name) const {
  return __atomic_load_n(symbol(name).calls, __ATOMIC_RELAXED);
}

}  // namespace tessera::compiler::codegen
