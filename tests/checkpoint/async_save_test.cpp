// async_save: the checkpoint has the values of the call, whatever training does meanwhile; errors reach every rank.
#include "new_folder.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <future>

namespace tessera::dcp {
namespace {

using testing::Rank;
using testing::run_ranks;

// Uneven shards of both kinds, a replicated tensor, a plain one.
StateDict async_dict(const DeviceMesh& mesh, double value) {
  return {{"w", full({7, 3}, value, mesh, {Shard(0)})},
          {"s", full({11}, value, mesh, {StridedShard(0, 2)})},
          {"r", full({4}, value, mesh, {Replicate()})},
          {"b", at::full({2}, value)}};
}

void expect_values(const std::string& path, const DeviceMesh& mesh, double value) {
  const auto found = async_dict(mesh, -1);
  load(found, path);
  for (const auto& [name, tensor] : found) {
    const auto local = is_dtensor(tensor) ? DTensor(tensor).to_local() : tensor;
    EXPECT_TRUE(local.eq(value).all().item<bool>()) << path << " " << name << " " << local;
  }
}

// The thread writes nothing until the tensors have changed. With async_staging it also makes the copy; after
// wait_staging() the tensors may change.
TEST(AsyncSave, HasTheValuesOfTheCall) {
  const NewFolder folder;
  for (const bool async_staging : {false, true})
    for (const int64_t ranks : {1, 2, 3})
      run_ranks(ranks, [&](Rank& me) {
        const auto mesh = me.mesh(std::vector<int64_t>{me.size()});
        const auto parent = folder / c10::str(ranks, async_staging ? "-staging" : "");
        AsyncSave saving;
        saving.wait_staging();               // without a save: nothing to wait for
        for (const int64_t step : {1, 2}) {  // the second one copies into the memory of the first
          std::promise<void> changed;
          const auto wait_for_change = [ready = changed.get_future().share()](std::string_view stage) {
            if (stage == "shard") ready.wait();
          };
          const auto dict = async_dict(mesh, static_cast<double>(step));
          saving = async_save(dict, step_folder(parent, step), {{"step", step}},
                              {.async_staging = async_staging, .on_stage = wait_for_change}, std::move(saving));
          saving.wait_staging();
          EXPECT_TRUE(saving);
          EXPECT_FALSE(saving.complete());
          EXPECT_EQ(saving.path(), step_folder(parent, step));
          for (const auto& [name, tensor] : dict) tensor.fill_(100);
          changed.set_value();
        }
        saving.wait();
        EXPECT_TRUE(saving.complete());
        saving.wait();  // again: nothing to do
        for (const int64_t step : {1, 2}) {
          expect_values(step_folder(parent, step), mesh, static_cast<double>(step));
          EXPECT_EQ(std::get<int64_t>(read_values(step_folder(parent, step)).at("step")), step);
        }
      });
}

TEST(AsyncSave, WithAsyncStagingAnErrorEndsTheWaitForTheCopy) {
  const NewFolder folder;
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    auto fail = [&](std::string_view stage) {
      if (stage == "shard" && me.rank == 1) throw std::runtime_error("no more");
    };
    auto saving = async_save(async_dict(mesh, 1), folder / "a", {}, {.async_staging = true, .on_stage = fail});
    saving.wait_staging();
    EXPECT_ERROR(UsageError, saving.wait(), "no more");
  });
}

TEST(AsyncSave, KeepsTheLatest) {
  const NewFolder folder;
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    AsyncSave saving;
    for (const int64_t step : {1, 2, 3, 4})
      saving =
          async_save(async_dict(mesh, 1), step_folder(folder.path(), step), {}, {.keep_latest = 2}, std::move(saving));
    saving.wait();
    if (me.rank == 0) {
      const auto steps = steps_in(folder.path());
      ASSERT_EQ(steps.size(), 2u);
      EXPECT_EQ(steps[0].first, 3);
    }
  });
}

TEST(AsyncSave, ErrorsOfThePlanAreThrownAtOnce) {
  const NewFolder folder;
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    const auto dict = async_dict(mesh, 1);
    save(dict, folder / "step-1");
    EXPECT_ERROR(UsageError, async_save(dict, folder / "step-1"), "step-1' already exists");
    EXPECT_ERROR(UsageError, async_save({{"m", at::empty({2}, at::kMeta)}}, folder / "step-2"),
                 "'m' [2] is on the meta");
    expect_values(folder / "step-1", mesh, 1);
  });
}

// A rank that cannot write fails all of them, in wait(). The folder then has no checkpoint and no rest of one.
TEST(AsyncSave, ErrorsOfTheDiskAreThrownByWaitOnAllRanks) {
  const NewFolder folder;
  run_ranks(3, [&](Rank& me) {
    const auto mesh = me.mesh("dp=3");
    const auto fail = [&](std::string_view stage) {
      if (stage == "shard" && me.rank == 1) TESSERA_FAIL(SystemError, "No space left on device");
    };
    auto saving = async_save(async_dict(mesh, 1), folder / "step-1", {}, {.on_stage = fail});
    EXPECT_ERROR(SystemError, saving.wait(), "saving '", "step-1': rank 1: No space left on device");
    EXPECT_TRUE(saving.done());
    EXPECT_FALSE(saving.complete());
    EXPECT_FALSE(std::filesystem::exists(folder / "step-1"));
    if (me.rank == 0) {  // which has removed it
      EXPECT_FALSE(std::filesystem::exists(folder / "step-1.partial"));
    }
    saving = async_save(async_dict(mesh, 2), folder / "step-1", {}, {}, std::move(saving));  // works again
    saving.wait();
    expect_values(folder / "step-1", mesh, 2);
  });
}

// The plan of a second save would remove the .partial of the first one.
TEST(AsyncSave, ASecondSaveIntoTheFolderIsRefusedUntilTheFirstHasEnded) {
  const NewFolder folder;
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    const auto dict = async_dict(mesh, 1);
    std::promise<void> go_on;
    auto wait = [ready = go_on.get_future().share()](std::string_view stage) {
      if (stage == "shard") ready.wait();
    };
    auto first = async_save(dict, folder / "step-1", {}, {.on_stage = wait});
    EXPECT_ERROR(UsageError, save(dict, folder / "step-2"), "an asynchronous save into '", "' is running", "wait()");
    EXPECT_ERROR(UsageError, async_save(dict, folder / "step-2"), "' is running");
    auto elsewhere = async_save(dict, folder / "other/step-2");
    elsewhere.wait();
    go_on.set_value();
    first.wait();
    save(dict, folder / "step-2");
    for (const char* name : {"step-1", "step-2", "other/step-2"}) expect_values(folder / name, mesh, 1);
  });
}

TEST(AsyncSave, WithoutASaveItIsDone) {
  AsyncSave none;
  EXPECT_FALSE(none);
  EXPECT_TRUE(none.done());
  EXPECT_FALSE(none.complete());
  none.wait();
  EXPECT_ERROR(UsageError, none.path(), "has no path");
}

}  // namespace
}  // namespace tessera::dcp
