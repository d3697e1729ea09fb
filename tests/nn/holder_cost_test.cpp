// What a call through a holder costs where no hook is set: at most 60 instructions more than LibTorch's holder takes,
// counted by callgrind, which counts the same every time. The test runs itself under valgrind.
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
TESSERA_MODULE_IMPL(Ours, NothingImpl);

constexpr int kCalls = 1000;

}  // namespace

// Named so that callgrind can be told to count in them.
C10_NOINLINE int counted_plain(Plain& module) {
  int sum = 0;
  for (int i = 0; i < kCalls; i++) sum += module(i);
  return sum;
}
C10_NOINLINE int counted_ours(Ours& module) {
  int sum = 0;
  for (int i = 0; i < kCalls; i++) sum += module(i);
  return sum;
}

namespace {

TEST(HolderCost, Child) {  // what runs under valgrind
  Plain plain;
  Ours ours;
  CALLGRIND_START_INSTRUMENTATION;
  counted_plain(plain), counted_ours(ours);  // the first calls look up symbols
  CALLGRIND_ZERO_STATS;
  counted_plain(plain);
  CALLGRIND_DUMP_STATS;
  counted_ours(ours);
  CALLGRIND_DUMP_STATS;
  CALLGRIND_STOP_INSTRUMENTATION;
}

// Instructions a call, from what callgrind wrote.
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
  std::string said;
  std::array<char, 512> line{};
  FILE* pipe = popen(command.c_str(), "r");
  while (fgets(line.data(), line.size(), pipe)) said += line.data();
  pclose(pipe);
  return said;
}

}  // namespace
#endif

namespace {

TEST(HolderCost, AtMostSixtyInstructionsMoreThanLibTorchs) {
#ifdef TESSERA_CAN_COUNT
  if (std::system("valgrind --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "valgrind is not installed";
  std::string folder = ::testing::TempDir() + "tessera-callgrind-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const auto said = run_under_callgrind(folder + "/out");
  const double plain = count_in(folder + "/out.1"), ours = count_in(folder + "/out.2");
  std::filesystem::remove_all(folder);
  ASSERT_GT(plain, 1) << said;
  ASSERT_GT(ours, plain) << said;
  std::printf("plain %.1f, ours %.1f: %.1f more\n", plain, ours, ours - plain);
  EXPECT_LE(ours - plain, 60);
#else
  GTEST_SKIP() << "built without valgrind's headers";
#endif
}

}  // namespace
}  // namespace tessera
