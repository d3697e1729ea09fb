#include "tessera/compile/detail/codegen/library.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/warn_once.h"
#include "tessera/base/detail/settings.h"
#include "tessera/compile/detail/codegen/compiler.h"

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

std::atomic<int64_t> built{0};

constexpr size_t kChecksum = 40;  // hexadecimal digits at the end of a file, behind what a loader looks at
std::string checksum(const std::string& bytes) { return c10::sha1(bytes).str(); }

fs::path cache_folder() {
  if (setting_is_set("TESSERA_CACHE_DIR")) return setting("TESSERA_CACHE_DIR");
  if (setting_is_set("XDG_CACHE_HOME")) return fs::path(setting("XDG_CACHE_HOME")) / "tessera";
  TESSERA_CHECK(setting_is_set("HOME"), UsageError,
                "codegen: there is no folder for built kernels; set TESSERA_CACHE_DIR, XDG_CACHE_HOME or HOME");
  return fs::path(setting("HOME")) / ".cache" / "tessera";
}

std::string source_of(const Library::Kernels& kernels) {
  std::string text = "#include <cstdint>\nextern \"C\" {\n";
  for (const auto& [name, source] : kernels) text += "\n" + source;
  return text + "\n}\n";
}

std::optional<std::string> read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return {};
  return std::string(std::istreambuf_iterator<char>(in), {});
}

void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  out.close();
  TESSERA_CHECK(out, UsageError, "codegen: cannot write ", path.string(),
                "; set TESSERA_CACHE_DIR to a folder for built kernels");
}

// Whole, or not at all: a name of its own first.
class Temporary {
 public:
  explicit Temporary(const fs::path& wanted) : wanted_(wanted), path_(wanted) {
    static std::atomic<int64_t> next{0};
    path_.replace_filename(c10::str(wanted.stem().string(), ".", getpid(), ".", next++, wanted.extension().string()));
  }
  ~Temporary() {
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

void build_file(const SystemCompiler& compiler, const std::string& source, const fs::path& path) {
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  auto source_path = path;
  source_path.replace_extension(".cpp");
  const Temporary source_file(source_path), library_file(path);
  write_file(source_file.path(), source);
  built++;
  build(compiler, source_file.path().string(), library_file.path().string());
  auto bytes = read_file(library_file.path());
  TESSERA_CHECK(bytes, UsageError, "codegen: ", compiler.command[0], " has not written ", library_file.path().string());
  write_file(library_file.path(), *bytes + checksum(*bytes));
  source_file.keep();  // to read
  library_file.keep();
}

bool is_whole(const std::string& bytes) {
  if (bytes.size() <= kChecksum) return false;
  const auto end = bytes.size() - kChecksum;
  return checksum(bytes.substr(0, end)) == bytes.substr(end);
}

}  // namespace

Library::~Library() { dlclose(handle_); }

int64_t Library::builds() { return built; }

std::shared_ptr<const Library> Library::load(const Kernels& kernels) {
  const auto compiler = find_compiler();
  TESSERA_CHECK(compiler, UsageError, "codegen: there is no C++ compiler; CXX is \"", setting("CXX"),
                "\", and c++, g++ and clang++ are not in PATH");
  const auto source = source_of(kernels);
  const auto path = (cache_folder() / (checksum(compiler->identity + source) + ".so")).string();

  // Ranks that are threads come here together: one builds, the others have it.
  static std::mutex mutex;
  static auto* loaded = new std::map<std::string, std::weak_ptr<const Library>>;  // by path
  const std::lock_guard lock(mutex);
  auto& here = (*loaded)[path];
  auto library = here.lock();
  if (!library) library = open(path, kernels);
  if (!library) {
    build_file(*compiler, source, path);
    library = open(path, kernels);
    TESSERA_CHECK(library, InternalError, "codegen: ", path, " was just built and cannot be loaded");
  }
  here = library;
  return library;
}

// Null where there is none that can be used.
std::shared_ptr<const Library> Library::open(const std::string& path, const Kernels& kernels) {
  const auto bytes = read_file(path);
  if (!bytes) return {};
  const auto damaged = [&](const std::string& how) {
    warn_once("codegen/" + path, c10::str("codegen: ", path, " is damaged (", how, "); it is built anew"));
    return nullptr;
  };
  if (!is_whole(*bytes)) return damaged("its checksum does not hold");
  auto* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return damaged(dlerror());
  const std::shared_ptr<Library> library(new Library(path, handle));
  for (const auto& [name, source] : kernels) {
    auto* function = dlsym(handle, name.c_str());
    auto* calls = dlsym(handle, (name + "_calls").c_str());
    if (!function || !calls) return damaged("it has no " + name);
    library->symbols_[name] = {reinterpret_cast<Function>(function), static_cast<const int64_t*>(calls)};
  }
  return library;
}

const Library::Symbol& Library::symbol(const std::string& name) const {
  const auto found = symbols_.find(name);
  TESSERA_CHECK(found != symbols_.end(), InternalError, "codegen: ", path_, " has no function ", name);
  return found->second;
}

Function Library::function(const std::string& name) const { return symbol(name).function; }
int64_t Library::calls(const std::string& name) const { return __atomic_load_n(symbol(name).calls, __ATOMIC_RELAXED); }

}  // namespace tessera::compiler::codegen
