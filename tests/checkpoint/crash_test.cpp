// If a process is killed at any stage of a save, older checkpoints stay intact and the next save works.
#include "new_folder.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/spawn.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <optional>

namespace tessera::dcp {
namespace {

using testing::Rank;
using testing::run_ranks;
using testing::spawn_ranks;
namespace fs = std::filesystem;

// The processes run this program again. They get the folder from the parent process, which also removes it.
constexpr const char* kFolderVariable = "CHECKPOINT_TEST_FOLDER";

StateDict dict(const DeviceMesh& mesh, double value) {
  return {{"w", full({7, 3}, value, mesh, {Shard(0)})},
          {"v", full({5}, value, mesh, {Shard(0)})},
          {"b", at::full({2}, value)}};
}

void expect_loads(const std::string& path, double value) {
  run_ranks(3, [&](Rank& me) {
    const auto mesh = me.mesh("dp=3");
    const auto found = dict(mesh, 0), wanted = dict(mesh, value);
    load(found, path);
    for (const std::string name : {"w", "v"})
      EXPECT_TRUE(DTensor(found.at(name)).to_local().equal(DTensor(wanted.at(name)).to_local()));
    EXPECT_TRUE(found.at("b").equal(wanted.at("b")));
  });
}

struct CrashPoint {
  const char* name;   // of the test
  const char* stage;  // at which the last rank is killed
  int ranks;
  int count;      // of earlier calls with this stage
  bool survives;  // the new checkpoint is complete
  bool asynchronous = false;
};
std::ostream& operator<<(std::ostream& out, const CrashPoint& at) { return out << at.name; }

class Crash : public ::testing::TestWithParam<CrashPoint> {};

TEST_P(Crash, LastCompleteCheckpointLoads) {
  const auto& at = GetParam();
  std::optional<NewFolder> folder;
  if (!std::getenv(kFolderVariable)) setenv(kFolderVariable, folder.emplace().path().c_str(), 1);
  const std::string parent = std::getenv(kFolderVariable);
  const auto body = [&](Rank& me) {
    const auto mesh = me.mesh(std::vector<int64_t>{me.size()});
    // The save of step 2 overwrites the files of step 0.
    save(dict(mesh, 0), step_folder(parent, 0));
    save(dict(mesh, 1), step_folder(parent, 1), {}, {.keep_latest = 1});
    int seen = 0;
    const auto die = [&](std::string_view stage) {
      if (stage == at.stage && me.rank + 1 == me.size() && seen++ == at.count) kill(getpid(), SIGKILL);
    };
    if (at.asynchronous)
      async_save(dict(mesh, 2), step_folder(parent, 2), {}, {.on_stage = die}).wait();
    else
      save(dict(mesh, 2), step_folder(parent, 2), {}, {.on_stage = die});
    ADD_FAILURE() << "rank " << me.rank << " was not killed";
  };
  EXPECT_THROW(spawn_ranks(at.ranks, body, {.timeout = std::chrono::seconds(20)}), std::exception);
  unsetenv(kFolderVariable);

  const auto last = at.survives ? 2 : 1;
  EXPECT_EQ(latest(parent), step_folder(parent, last));
  expect_loads(step_folder(parent, last), last);
  EXPECT_EQ(fs::exists(partial_folder(step_folder(parent, 2))), !at.survives);

  run_ranks(2, [&](Rank& me) { save(dict(me.mesh("dp=2"), 3), step_folder(parent, 3)); });
  expect_loads(step_folder(parent, 3), 3);
  expect_loads(step_folder(parent, 1), 1);
  for (const auto& entry : fs::directory_iterator(parent))
    EXPECT_NE(entry.path().extension(), ".partial") << "save() removes what the crash left";
}

INSTANTIATE_TEST_SUITE_P(
    Every, Crash,
    ::testing::Values(CrashPoint{"planned", "planned", 1, 0, false}, CrashPoint{"first_shard", "shard", 1, 0, false},
                      CrashPoint{"later_shard", "shard", 2, 1, false}, CrashPoint{"written", "written", 1, 0, false},
                      CrashPoint{"complete", "complete", 1, 0, false}, CrashPoint{"renamed", "renamed", 1, 0, true},
                      CrashPoint{"async_shard", "shard", 2, 0, false, true},
                      CrashPoint{"async_complete", "complete", 1, 0, false, true}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::dcp
