#include "tessera/compile/detail/codegen/kernel_library.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/detail/warn_once.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/system_compiler.h"

#include <c10/util/hash.h>
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>

namespace fs = std::filesystem;

namespace tessera::compiler::codegen {
namespace {

std::atomic<int64_t> builds_of_process{0};

constexpr size_t kChecksumDigits = 40;  // hexadecimal, at the end of the file, where dlopen ignores them
std::string sha1_hex(const std::string& bytes) { return c10::sha1(bytes).str(); }

fs::path kernel_cache_folder() {
  if (setting_is_set("TESSERA_CACHE_DIR")) return setting("TESSERA_CACHE_DIR");
  if (setting_is_set("XDG_CACHE_HOME")) return fs::path(setting("XDG_CACHE_HOME")) / "tessera";
  TESSERA_CHECK(setting_is_set("HOME"), UsageError,
                "codegen: generated kernels need a cache folder; set TESSERA_CACHE_DIR, XDG_CACHE_HOME or HOME");
  return fs::path(setting("HOME")) / ".cache" / "tessera";
}

std::string source_file_of(const KernelLibrary::Kernels& kernels) {
  std::string text = "#include <cstdint>\nextern \"C\" {\n";
  for (const auto& [name, source] : kernels) text += "\n" + source;
  return text + "\n}\n";
}

std::optional<std::string> read_bytes(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return {};
  return std::string(std::istreambuf_iterator<char>(in), {});
}

void write_bytes(const fs::path& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  out.close();
  TESSERA_CHECK(out, UsageError, "codegen: cannot write ", path.string(),
                "; set TESSERA_CACHE_DIR to a folder that can be written");
}

// A file under a unique temporary name. keep() renames it to the wanted name; otherwise it is deleted.
class TemporaryFile {
 public:
  explicit TemporaryFile(const fs::path& wanted) : wanted_(wanted), path_(wanted) {
    static std::atomic<int64_t> next{0};
    path_.replace_filename(c10::str(wanted.stem().string(), ".", getpid(), ".", next++, wanted.extension().string()));
  }
  ~TemporaryFile() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  const fs::path& path() const { return path_; }
  void keep() const {
    std::error_code failed;
    fs::rename(path_, wanted_, failed);
    TESSERA_CHECK(!failed, UsageError, "codegen: cannot rename ", path_.string(), " to ", wanted_.string(), ": ",
                  failed.message());
  }

 private:
  fs::path wanted_, path_;
};

void build_library_file(const SystemCompiler& compiler, const std::string& source, const fs::path& path) {
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  auto source_path = path;
  source_path.replace_extension(".cpp");
  const TemporaryFile source_file(source_path), library_file(path);
  write_bytes(source_file.path(), source);
  builds_of_process++;
  build_shared_library(compiler, source_file.path().string(), library_file.path().string());
  auto bytes = read_bytes(library_file.path());
  TESSERA_CHECK(bytes, UsageError, "codegen: ", compiler.command[0], " did not write ", library_file.path().string());
  write_bytes(library_file.path(), *bytes + sha1_hex(*bytes));
  source_file.keep();  // for people who want to read it
  library_file.keep();
}

bool has_valid_checksum(const std::string& bytes) {
  if (bytes.size() <= kChecksumDigits) return false;
  const auto end = bytes.size() - kChecksumDigits;
  return sha1_hex(bytes.substr(0, end)) == bytes.substr(end);
}

}  // namespace

KernelLibrary::~KernelLibrary() { dlclose(handle_); }

int64_t KernelLibrary::builds() { return builds_of_process; }

std::shared_ptr<const KernelLibrary> KernelLibrary::load(const Kernels& kernels) {
  const auto compiler = find_compiler();
  TESSERA_CHECK(compiler, UsageError, "codegen: found no C++ compiler; CXX is \"", setting("CXX"),
                "\", and c++, g++ and clang++ are not in PATH");
  const auto source = source_file_of(kernels);
  const auto path = (kernel_cache_folder() / (sha1_hex(compiler->identity + source) + ".so")).string();

  // Ranks can be threads: the first one builds, the others wait and share the result.
  static std::mutex mutex;
  static auto* loaded = new std::map<std::string, std::weak_ptr<const KernelLibrary>>;  // by path
  const std::lock_guard lock(mutex);
  auto& here = (*loaded)[path];
  auto library = here.lock();
  if (!library) library = open(path, kernels);
  if (!library) {
    build_library_file(*compiler, source, path);
    library = open(path, kernels);
    TESSERA_CHECK(library, InternalError, "codegen: ", path,
                  " cannot be loaded although it was just built; please report this");
  }
  here = library;
  return library;
}

// Null if the file does not exist or is damaged.
std::shared_ptr<const KernelLibrary> KernelLibrary::open(const std::string& path, const Kernels& kernels) {
  const auto bytes = read_bytes(path);
  if (!bytes) return {};
  const auto damaged = [&](const std::string& how) {
    warn_once("codegen/" + path, c10::str("codegen: ", path, " is damaged (", how, "); it is rebuilt"));
    return nullptr;
  };
  if (!has_valid_checksum(*bytes)) return damaged("its checksum does not match");
  auto* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return damaged(dlerror());
  const std::shared_ptr<KernelLibrary> library(new KernelLibrary(path, handle));
  for (const auto& [name, source] : kernels) {
    auto* function = dlsym(handle, name.c_str());
    auto* calls = dlsym(handle, (name + "_calls").c_str());
    if (!function || !calls) return damaged("it does not define " + name);
    library->symbols_[name] = {reinterpret_cast<KernelFunction>(function), static_cast<const int64_t*>(calls)};
  }
  return library;
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
