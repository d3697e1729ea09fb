// The cost of a call through a holder without hooks: at most 60 instructions more than with LibTorch's holder.
// callgrind counts the instructions, which is deterministic. The test runs itself under valgrind.
#include "tessera/nn/holder.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#endif

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#if __has_include(<valgrind/callgrind.h>)
#define TESSERA_CAN_COUNT
#endif

namespace tessera {

#ifdef TESSERA_CAN_COUNT
namespace {

struct NothingImpl : torch::nn::Module {
  C10_NOINLINE int forward(int x) { return x + calls++; }
  int calls = 0;
};
TORCH_MODULE_IMPL(Plain, NothingImpl);
TESSERA_MODULE_IMPL(WithHooks, NothingImpl);

constexpr int kCalls = 1000;

}  // namespace

// External functions, so that the compiler does not merge the two loops.
C10_NOINLINE int counted_plain(Plain& module) {
  int sum = 0;
  for (int i = 0; i < kCalls; i++) sum += module(i);
  return sum;
}
C10_NOINLINE int counted_with_hooks(WithHooks& module) {
  int sum = 0;
  for (int i = 0; i < kCalls; i++) sum += module(i);
  return sum;
}

namespace {

TEST(HolderCost, Child) {  // runs under valgrind
  Plain plain;
  WithHooks with_hooks;
  CALLGRIND_START_INSTRUMENTATION;
  counted_plain(plain), counted_with_hooks(with_hooks);  // the first calls resolve symbols
  CALLGRIND_ZERO_STATS;
  counted_plain(plain);
  CALLGRIND_DUMP_STATS;
  counted_with_hooks(with_hooks);
  CALLGRIND_DUMP_STATS;
  CALLGRIND_STOP_INSTRUMENTATION;
}

// Instructions per call, from the output file of callgrind.
double count_in(const std::string& file) {
  std::ifstream in(file);
  for (std::string word; in >> word;)
    if (double total; (word == "summary:" || word == "totals:") && in >> total) return total / kCalls;
  return -1;
}

std::string run_under_callgrind(const std::string& out) {
  std::string self(4096, '\0');
  self.resize(static_cast<size_t>(std::max<ssize_t>(0, readlink("/proc/self/exe", self.data(), self.size()))));
  const std::string command = "valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file=" + out + " " + self +
                              " --gtest_filter=HolderCost.Child 2>&1";
  std::string output;
  std::array<char, 512> line{};
  FILE* pipe = popen(command.c_str(), "r");
  while (fgets(line.data(), line.size(), pipe)) output += line.data();
  pclose(pipe);
  return output;
}

}  // namespace
#endif

namespace {

TEST(HolderCost, AtMostSixtyInstructionsMoreThanLibTorchs) {
#ifdef TESSERA_CAN_COUNT
  if (std::system("valgrind --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "valgrind is not installed";
  std::string folder = ::testing::TempDir() + "tessera-callgrind-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const auto output = run_under_callgrind(folder + "/out");
  const double plain = count_in(folder + "/out.1"), with_hooks = count_in(folder + "/out.2");
  std::filesystem::remove_all(folder);
  ASSERT_GT(plain, 1) << output;
  ASSERT_GT(with_hooks, plain) << output;
  std::printf("LibTorch %.1f, Tessera %.1f: %.1f more\n", plain, with_hooks, with_hooks - plain);
  EXPECT_LE(with_hooks - plain, 60);
#else
  GTEST_SKIP() << "built without valgrind's headers";
#endif
}

}  // namespace
}  // namespace tessera
