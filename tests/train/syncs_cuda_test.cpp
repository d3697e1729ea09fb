// A training step on CUDA does not make the host wait for the device: a run of 40 steps has as many blocking calls as
// one of 20. Losses are waited for at logged steps alone, and these runs log the first and the last one.
#include "tests/checkpoint/new_folder.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>

namespace tessera {
namespace {

using SyncCounts = std::map<std::string, int64_t>;

SyncCounts blocking_calls(const std::string& flags, int steps, const std::string& folder) {
  const auto counts_file = c10::str(folder, "/counts.", steps), log_file = c10::str(folder, "/log.", steps);
  // A cache of its own: with an empty one, a run waits for the algorithms that it measures.
  const auto command = c10::str("COUNT_SYNCS=", counts_file, " TESSERA_CACHE_DIR=", folder, "/cache.", steps,
                                " LD_PRELOAD=" TESSERA_COUNT_SYNCS " " TESSERA_PROGRAM
                                " train --device cuda --layers 2 --batch 8 --data arithmetic --log-every 1000 --steps ",
                                steps, " --output ", folder, "/run.", steps, " ", flags, " > ", log_file, " 2>&1");
  EXPECT_EQ(std::system(command.c_str()), 0) << command << "\n" << dcp::read(log_file);
  SyncCounts counts;
  std::ifstream file(counts_file);
  for (std::string line; std::getline(file, line);) {
    const auto space = line.rfind(' ');
    counts[line.substr(0, space)] = std::stoll(line.substr(space + 1));
  }
  EXPECT_FALSE(counts.empty()) << dcp::read(log_file);
  return counts;
}

int64_t total(const SyncCounts& counts) {
  int64_t sum = 0;
  for (const auto& [function, calls] : counts) sum += calls;
  return sum;
}

TEST(Syncs, StepsDoNotWait) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const dcp::NewFolder folder;
  int n = 0;
  for (const std::string flags : {"--precision fp32 --mesh dp=1", "--precision bf16 --mesh dp=1",
                                  "--precision fp16 --mesh dp=1", "--precision bf16 --mesh dp=1 --compile",
                                  "--precision bf16 --mesh fsdp=1", "--precision bf16 --mesh fsdp=1 --compile"}) {
    SCOPED_TRACE(flags);
    const auto own = folder / std::to_string(n++);
    std::filesystem::create_directory(own);
    const auto per_step = (total(blocking_calls(flags, 40, own)) - total(blocking_calls(flags, 20, own))) / 20;
    EXPECT_EQ(per_step, 0);
    std::cout << flags << ": " << per_step << " blocking calls per step\n";
  }
}

}  // namespace
}  // namespace tessera
