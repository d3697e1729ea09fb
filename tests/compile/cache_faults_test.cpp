// Faults around the kernel cache: a compiler that hangs, a full disk, a folder that cannot be written, many processes
// at once, a folder that has reached its bound. A step then runs op by op, or from the cache, and its results are
// right.
#include "tessera/compile/api/compile.h"
#include "tessera/compile/detail/codegen/kernel_library.h"

#include "captured_warnings.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace tessera {
namespace {

namespace fs = std::filesystem;
using compiler::codegen::KernelLibrary;

// A cache folder of its own, and environment variables for one test.
class CacheFaults : public ::testing::Test {
 protected:
  CacheFaults() {
    std::string pattern = ::testing::TempDir() + "faultsXXXXXX";
    folder_ = mkdtemp(pattern.data());
    set("TESSERA_CACHE_DIR", folder_.string());
  }
  ~CacheFaults() override {
    for (const auto& [name, before] : before_) before ? setenv(name, before->c_str(), 1) : unsetenv(name);
    fs::remove_all(folder_);
  }
  void set(const char* name, const std::string& value) {
    const char* before = std::getenv(name);
    before_.emplace(name, before ? std::optional<std::string>(before) : std::nullopt);
    setenv(name, value.c_str(), 1);
  }
  // A compiler that has a version and runs `script` when it is to compile.
  void use_compiler(const std::string& script) {
    const auto compiler = folder_ / "compiler";
    std::ofstream(compiler) << "#!/bin/sh\n[ \"$1\" = --version ] || { " << script << "; }\n";
    fs::permissions(compiler, fs::perms::owner_all);
    set("CXX", compiler.string());
  }
  // The step gives the right result, and says once why it has no kernels ("": it has them).
  static void expect_right_result(const std::string& warning) {
    CapturedWarnings warnings;
    auto step = compile([](const at::Tensor& x) { return (x * 2 + x).relu() - x; });
    const auto x = torch::randn({100});
    for (int i = 0; i < 2; i++) EXPECT_TRUE(at::equal(step(x), (x * 2 + x).relu() - x));
    if (warning.empty()) return;
    EXPECT_EQ(warnings.count("replayed op by op"), 1u);
    EXPECT_EQ(warnings.count(warning), 1u) << (warnings.messages.empty() ? "" : warnings.messages[0]);
    EXPECT_EQ(step.executable().library(), nullptr);
  }

  fs::path folder_;

 private:
  std::map<const char*, std::optional<std::string>> before_;
};

// warn_once() says each kind of failure once per process, so each of these tests runs in a child process.
template <class F>
void in_child(const F& body) {
  const auto child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    body();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(CacheFaults, ACompilerThatFails) {
  use_compiler("echo 'no more registers'; exit 3");
  in_child([] { expect_right_result("ended with exit code 3:\nno more registers"); });
}

TEST_F(CacheFaults, ACompilerThatHangsIsKilled) {
  use_compiler("sleep 1000");
  set("TESSERA_COMPILER_TIMEOUT_S", "1");
  in_child([] {
    const auto begin = std::chrono::steady_clock::now();
    expect_right_result("did not end within 1 s and was killed");
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  });
}

TEST_F(CacheFaults, AFullDisk) {
  in_child([] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{64, 64};  // bytes of a file
    setrlimit(RLIMIT_FSIZE, &limit);
    expect_right_result("codegen: ");
  });
}

TEST_F(CacheFaults, AFolderThatCannotBeWritten) {
  set("TESSERA_CACHE_DIR", "/proc/tessera");  // nobody can create it, not even root
  in_child([] { expect_right_result("codegen: "); });
}

TEST_F(CacheFaults, ADamagedLibraryIsRebuilt) {
  in_child([] { expect_right_result(""); });
  for (const auto& entry : fs::directory_iterator(folder_))
    if (entry.path().extension() == ".so") fs::resize_file(entry.path(), fs::file_size(entry.path()) / 2);
  in_child([] { expect_right_result(""); });
}

const KernelLibrary::Kernels kKernels[] = {
    {{"one", "int64_t one_calls = 0;\nvoid one(void* const*, int64_t, int64_t) { one_calls++; }\n"}},
    {{"two", "int64_t two_calls = 0;\nvoid two(void* const*, int64_t, int64_t) { two_calls++; }\n"}}};

// One of them builds.
TEST_F(CacheFaults, HundredProcessesStartTogether) {
  std::vector<pid_t> children;
  for (int i = 0; i < 100; i++) {
    children.push_back(fork());
    ASSERT_GE(children.back(), 0);
    if (children.back() != 0) continue;
    const auto before = KernelLibrary::builds();
    const auto library = KernelLibrary::load(kKernels[0]);
    library->function("one")(nullptr, 0, 1);
    _exit(library->calls("one") != 1 ? 2 : static_cast<int>(KernelLibrary::builds() - before));  // 0 or 1 builds
  }
  int builds = 0;
  for (const auto child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_LE(WEXITSTATUS(status), 1);
    builds += WEXITSTATUS(status);
  }
  EXPECT_EQ(builds, 1);
}

TEST_F(CacheFaults, TheFolderIsBounded) {
  const auto libraries = [&] {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder_))
      if (entry.path().extension() == ".so") found.push_back(entry.path().string());
    return found;
  };
  auto first = KernelLibrary::load(kKernels[0]);
  EXPECT_EQ(libraries().size(), 1u);
  set("TESSERA_CACHE_MB", "0");
  const auto second = KernelLibrary::load(kKernels[1]);
  EXPECT_EQ(libraries(), std::vector<std::string>{second->path()});  // the older one is deleted
  first->function("one")(nullptr, 0, 1);                             // and still works
  EXPECT_EQ(first->calls("one"), 1);
  first.reset();
  EXPECT_NE(KernelLibrary::load(kKernels[0])->function("one"), nullptr);  // it is built again
}

}  // namespace
}  // namespace tessera
