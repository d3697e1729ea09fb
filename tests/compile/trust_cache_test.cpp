// The kernel cache: another user of this host cannot make a process load code. Folders and files that others could have
// written are not loaded, whatever the umask is.
#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/compile/detail/codegen/result_files.h"
#include "tessera/compile/detail/codegen/system_compiler.h"
#include "tessera/testing/expect_error.h"

#include "captured_warnings.h"

#include <c10/util/hash.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

namespace tessera::compiler {
namespace {

namespace fs = std::filesystem;
using codegen::KernelLibrary;

constexpr int64_t kGenuine = 1, kPlanted = 666;

std::string kernel_source(int64_t marker) {
  return c10::str(
      "int64_t marked_calls = 0;\nvoid marked(void* const* operands, int64_t, int64_t) { *(int64_t*)operands[0] = ",
      marker, "; }\n");
}
const KernelLibrary::Kernels kMarked = {{"marked", kernel_source(kGenuine)}};

std::string bytes_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void put_bytes(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }
void put_folder(const fs::path& path, mode_t mode) {
  mkdir(path.c_str(), 0700);
  chmod(path.c_str(), mode);
}
unsigned mode_of(const fs::path& path) {
  struct stat about {};
  return lstat(path.c_str(), &about) == 0 ? about.st_mode & 07777 : 0;
}

class TrustCache : public ::testing::Test {
 protected:
  TrustCache() : umask_(umask(0)) {
    std::string pattern = ::testing::TempDir() + "trustXXXXXX";
    top_ = mkdtemp(pattern.data());
    chmod(top_.c_str(), 01777);  // like /tmp: others can create entries, and not replace those of this user
    use_cache("cache");
    setenv("XDG_STATE_HOME", (top_ / "state").c_str(), 1);
  }
  ~TrustCache() override {
    umask(umask_);
    fs::remove_all(top_);
  }
  void use_cache(const fs::path& folder) { setenv("TESSERA_CACHE_DIR", (top_ / folder).c_str(), 1); }

  // What the loaded kernel writes; 0 if the cache is refused.
  static int64_t loaded_marker() {
    int64_t marker = -1;
    void* operands[] = {&marker};
    try {
      KernelLibrary::load(kMarked)->function("marked")(operands, 0, 1);
    } catch (const UsageError&) {
      return 0;
    }
    return marker;
  }

  // A library that another user would like to be loaded: it has the right functions, and a hash of itself at its end.
  std::string planted_bytes() {
    const auto source = top_ / "planted.cpp", library = top_ / "planted.so";
    put_bytes(source, "#include <cstdint>\nextern \"C\" {\n" + kernel_source(kPlanted) + "}\n");
    codegen::build_shared_library(*codegen::find_compiler(), source.string(), library.string());
    const auto bytes = bytes_of(library);
    return bytes + c10::sha1(bytes).str();
  }

  fs::path top_;

 private:
  mode_t umask_;
};

TEST_F(TrustCache, FilesAndFoldersArePrivateWithAnyUmask) {
  const auto path = fs::path(KernelLibrary::load(kMarked)->path());
  EXPECT_EQ(mode_of(top_ / "cache"), 0700u);
  EXPECT_EQ(mode_of(path), 0600u);
  EXPECT_EQ(mode_of(fs::path(path).replace_extension(".cpp")), 0600u);
  EXPECT_EQ(mode_of(top_ / "state" / "tessera" / "kernel_key"), 0600u);
  EXPECT_EQ(mode_of(top_ / "state"), 0700u);
  EXPECT_EQ(mode_of(top_ / "cache" / "lock"), 0600u);
  for (const auto& entry : fs::directory_iterator(top_ / "cache"))
    EXPECT_TRUE(entry.path().stem() == path.stem() || entry.path().filename() == "lock")
        << entry.path() << " is left behind";
}

TEST_F(TrustCache, FoldersThatOthersCanWriteAreNotUsed) {
  put_folder(top_ / "cache", 0777);
  EXPECT_ERROR(UsageError, KernelLibrary::load(kMarked), "the kernel cache folder",
               "mode 0777: others can write there");
  put_folder(top_ / "open", 0777);
  use_cache("open/cache");
  EXPECT_ERROR(UsageError, KernelLibrary::load(kMarked), "/open' ", "others can write there");
  fs::create_symlink(top_ / "open", top_ / "link");
  use_cache("link");
  EXPECT_ERROR(UsageError, KernelLibrary::load(kMarked), "/link' is not used", "/open' ");
  put_bytes(top_ / "file", "");
  use_cache("file");
  EXPECT_ERROR(UsageError, KernelLibrary::load(kMarked), "is not a folder");
  use_cache("cache");
  put_folder(top_ / "cache", 0700);
  put_folder(top_ / "state", 0777);
  EXPECT_ERROR(UsageError, KernelLibrary::load(kMarked), "the folder of the kernel key", "/state' ");
}

// Each change is what a user with access to the folder, or a damaged disk, can do without the key.
TEST_F(TrustCache, FilesThatAreNotSignedByThisUserAreRebuilt) {
  const auto path = fs::path(KernelLibrary::load(kMarked)->path());
  const auto good = bytes_of(path), planted = planted_bytes();
  const std::pair<const char*, std::function<void()>> changes[] = {
      {"planted", [&] { put_bytes(path, planted); }},
      {"writable", [&] { chmod(path.c_str(), 0666); }},
      {"second link", [&] { fs::create_hard_link(path, top_ / "second"); }},
      {"symbolic link",
       [&] { put_bytes(top_ / "copy", good), fs::remove(path), fs::create_symlink(top_ / "copy", path); }},
  };
  for (const auto& [name, change] : changes) {
    change();
    CapturedWarnings warnings;
    const auto builds = KernelLibrary::builds();
    EXPECT_EQ(loaded_marker(), kGenuine) << name;
    EXPECT_EQ(KernelLibrary::builds(), builds + 1) << name;
    EXPECT_EQ(bytes_of(path), good) << name;
  }
  const auto key = top_ / "state" / "tessera" / "kernel_key";
  chmod(key.c_str(), 0622);
  EXPECT_ERROR(UsageError, KernelLibrary::load(kMarked), "kernel_key", "mode 0622", "delete it");
  fs::remove(key);
  EXPECT_EQ(loaded_marker(), kGenuine);
  EXPECT_NE(KernelLibrary::load(kMarked)->path(), path) << "another key has other file names";
}

constexpr uid_t kOtherUser = 65534;

// Runs f in a process of another user, and waits for it.
void as_other_user(const std::function<void()>& f) {
  const pid_t child = fork();
  if (child == 0) {
    if (setgroups(0, nullptr) != 0 || setresgid(kOtherUser, kOtherUser, kOtherUser) != 0 ||
        setresuid(kOtherUser, kOtherUser, kOtherUser) != 0)
      _exit(3);
    try {
      f();
    } catch (const std::exception&) {  // refused by the kernel
    }
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
}

// Compiled kernels for GPUs and chosen algorithms (result_files.h) follow the rules of built libraries.
TEST_F(TrustCache, ResultsAreReadBackOnlyIfThisUserWroteThem) {
  using codegen::read_result, codegen::write_result;
  const std::string result("cubin\0bytes", 11);
  EXPECT_FALSE(read_result("kernel a"));
  write_result("kernel a", result);
  write_result("kernel b", "other");
  EXPECT_EQ(read_result("kernel a"), result);
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(top_ / "cache"))
    if (entry.path().extension() == ".bin") files.push_back(entry.path());
  ASSERT_EQ(files.size(), 2u);
  for (const auto& file : files) EXPECT_EQ(mode_of(file), 0600u);

  CapturedWarnings warnings;
  const auto first = bytes_of(files[0]), second = bytes_of(files[1]);
  const auto expect_refused = [&](const char* what, const auto& damage) {
    put_bytes(files[0], first);
    put_bytes(files[1], second);
    for (const auto& file : files) chmod(file.c_str(), 0600);
    damage();
    EXPECT_FALSE(read_result("kernel a") && read_result("kernel b")) << what;
  };
  expect_refused("a changed byte", [&] { put_bytes(files[0], "x" + first.substr(1)); });
  expect_refused("the file of another key", [&] { put_bytes(files[0], second), put_bytes(files[1], first); });
  expect_refused("a short file", [&] { put_bytes(files[0], "x"); });
  expect_refused("a file that others can write", [&] { chmod(files[0].c_str(), 0666); });

  chmod((top_ / "cache").c_str(), 0777);  // the folder is not used: a warning, not an error
  write_result("kernel c", "new");
  EXPECT_FALSE(read_result("kernel c"));
}

TEST_F(TrustCache, AnotherUserCannotPlantCode) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can change its user id";
  const auto planted = planted_bytes();
  const auto name = fs::path(KernelLibrary::load(kMarked)->path()).filename();
  const auto genuine = top_ / "cache";

  // Tries everything on a folder of the victim.
  const auto attack_folder = [&](const fs::path& folder) {
    as_other_user([&] {
      std::error_code ignored;
      put_bytes(folder / name, planted);
      put_bytes(folder / "new.so", planted);
      fs::rename(folder / "new.so", folder / name, ignored);
      put_bytes(top_ / "own.so", planted);
      fs::rename(top_ / "own.so", folder / name, ignored);
      fs::create_symlink(top_ / "own.so", folder / name, ignored);
      fs::rename(folder, top_ / "away", ignored);
      chmod(folder.c_str(), 0777);
    });
  };
  const auto fill_own_folder = [&](const fs::path& folder, mode_t mode) {
    as_other_user([&] {
      put_folder(folder, 0777);
      put_bytes(folder / name, planted);
      put_folder(folder, mode);
    });
  };
  struct Attack {
    const char* what;
    int rounds;
    std::function<void(const std::string& folder)> run;
  };
  const Attack attacks[] = {
      {"creates the folder first", 7, [&](const std::string& folder) { fill_own_folder(top_ / folder, 0755); }},
      {"creates the folder first, writable for all", 7,
       [&](const std::string& folder) { fill_own_folder(top_ / folder, 0777); }},
      {"makes the folder a link to an own one", 7,
       [&](const std::string& folder) {
         fill_own_folder(top_ / (folder + "own"), 0755);
         as_other_user([&] { fs::create_directory_symlink(top_ / (folder + "own"), top_ / folder); });
       }},
      {"owns the parent", 7,
       [&](const std::string& folder) {
         as_other_user([&] { put_folder(top_ / (folder + "parent"), 0755); });
         use_cache(folder + "parent/cache");
         put_folder(top_ / (folder + "parent") / "cache", 0700);
         as_other_user([&] { fs::rename(top_ / (folder + "parent") / "cache", top_ / (folder + "parent") / "away"); });
         fill_own_folder(top_ / (folder + "parent") / "cache", 0755);
       }},
      {"writes into a cache that was made with umask 000", 7,
       [&](const std::string&) {
         use_cache("cache");
         attack_folder(genuine);
       }},
      {"makes the key first", 7,
       [&](const std::string& folder) {
         use_cache("cache");
         setenv("XDG_STATE_HOME", (top_ / (folder + "state")).c_str(), 1);
         as_other_user([&] {
           put_folder(top_ / (folder + "state"), 0755);
           put_folder(top_ / (folder + "state") / "tessera", 0755);
           put_bytes(top_ / (folder + "state") / "tessera" / "kernel_key", std::string(32, 'k'));
         });
       }},
      {"planted a file while the folder was open", 4,
       [&](const std::string& folder) {
         put_folder(top_ / folder, 0777);
         as_other_user([&] { put_bytes(top_ / folder / name, planted); });
         put_folder(top_ / folder, 0700);
       }},
      {"planted a file that was given to the victim", 4,
       [&](const std::string& folder) {
         put_folder(top_ / folder, 0777);
         as_other_user([&] { put_bytes(top_ / folder / name, planted); });
         put_folder(top_ / folder, 0700);
         ASSERT_EQ(chown((top_ / folder / name).c_str(), geteuid(), getegid()), 0);
         chmod((top_ / folder / name).c_str(), 0600);
       }},
  };
  int rounds = 0, successes = 0;
  CapturedWarnings warnings;
  for (const auto& attack : attacks)
    for (int i = 0; i < attack.rounds; i++, rounds++) {
      const auto folder = c10::str("round", rounds);
      use_cache(folder);
      setenv("XDG_STATE_HOME", (top_ / "state").c_str(), 1);
      attack.run(folder);
      const auto marker = loaded_marker();
      EXPECT_TRUE(marker == 0 || marker == kGenuine) << "another user " << attack.what;
      successes += marker == kPlanted;
    }
  EXPECT_EQ(rounds, 50);
  EXPECT_EQ(successes, 0);
}

}  // namespace
}  // namespace tessera::compiler
