#include "tessera/pipelining/schedule.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <csignal>
#include <mutex>
#include <stdexcept>

#include "tessera/base/error.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/sgd.h"
#include "tessera/pipelining/detail/pipeline_step.h"
#include "tessera/pipelining/detail/schedules.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tessera/testing/spawn.h"

namespace tessera::pipelining {
namespace {

using tessera::testing::Rank;
using tessera::testing::run_ranks;

// A model of `stages` residual blocks. All ranks make the same one.
struct Blocks {
  explicit Blocks(int64_t stages) {
    static std::mutex generator;  // ranks are threads and share LibTorch's
    const std::lock_guard lock(generator);
    torch::manual_seed(7);
    for (int64_t i = 0; i < stages; ++i) {
      torch::nn::Sequential block(torch::nn::Linear(6, 12), torch::nn::GELU(), torch::nn::Linear(12, 6),
                                  torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
      block->to(torch::kDouble);
      blocks.push_back(block);
    }
    input = torch::randn({11, 6}, torch::kDouble);  // 11 rows: microbatches differ in size
    target = torch::randn({11, 6}, torch::kDouble);
  }
  PipelineStage stage(int64_t index) {
    torch::nn::Sequential block = blocks[index];
    return {[block](const at::Tensor& x) mutable { return block->forward(x) + x; }, block->parameters(), index,
            static_cast<int64_t>(blocks.size())};
  }
  std::vector<torch::nn::Sequential> blocks;
  torch::Tensor input, target;
};

at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

void expect_same_as_one_rank(const PipelineShape& shape, const std::string& schedule, const std::string& backend) {
  SCOPED_TRACE(::testing::Message() << schedule << " ranks " << shape.ranks << " microbatches " << shape.microbatches);
  run_ranks(shape.ranks,
            [&](Rank& me) {
              Blocks plain(shape.stages());
              std::vector<at::Tensor> losses;
              const std::vector<at::Tensor> targets = plain.target.tensor_split(shape.microbatches);
              for (const at::Tensor& rows : plain.input.tensor_split(shape.microbatches)) {
                at::Tensor x = rows;
                for (int64_t i = 0; i < shape.stages(); ++i) x = plain.stage(i).forward(x);
                losses.push_back(squared_error(x, targets[losses.size()]));
                (losses.back() / static_cast<double>(shape.microbatches)).backward();
              }

              Blocks model(shape.stages());
              std::vector<PipelineStage> mine;
              const std::vector<int64_t> rank_of = stage_ranks(schedule, shape);
              for (int64_t i = shape.stages() - 1; i >= 0; --i)
                if (rank_of[i] == me.rank) mine.push_back(model.stage(i));
              PipelineSchedule pipeline(schedule, mine, shape.microbatches, squared_error, me.group());
              const at::Tensor output = pipeline.eval(model.input);
              EXPECT_EQ(output.defined(), rank_of.back() == me.rank);
              if (output.defined()) {
                at::Tensor x = plain.input;
                for (int64_t i = 0; i < shape.stages(); ++i) x = plain.stage(i).forward(x);
                EXPECT_TRUE(output.allclose(x, 1e-9, 1e-9));
              }
              for (int step = 1; step <= 2; ++step) {  // gradients accumulate over steps
                const std::vector<at::Tensor> found = pipeline.step(model.input, model.target);
                ASSERT_EQ(found.size(), rank_of.back() == me.rank ? losses.size() : 0);
                for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].allclose(losses[i], 1e-9, 1e-9));
                for (const PipelineStage& stage : mine) {
                  const std::vector<at::Tensor> expected = plain.stage(stage.stage_index()).parameters();
                  for (size_t i = 0; i < expected.size(); ++i)
                    EXPECT_TRUE(stage.parameters()[i].grad().allclose(step * expected[i].grad(), 1e-9, 1e-9))
                        << "stage " << stage.stage_index() << " parameter " << i;
                }
              }
            },
            {.backend = backend});
}

TEST(PipelineSchedule, EverySchedulesGradientsAreThoseOfOneRank) {
  for (const std::string& schedule : schedule_names()) {
    const int64_t local = schedule == "GPipe" || schedule == "1F1B" ? 1 : 2;
    for (const int64_t ranks : {1, 2, 4})
      for (const int64_t microbatches : {4, 8}) {
        if (schedule == "DualPipeV" && microbatches < 2 * ranks) continue;
        expect_same_as_one_rank({ranks, local, microbatches}, schedule, "threads");
      }
  }
}

TEST(PipelineSchedule, RunsOverSharedMemoryAndGloo) {
  for (const char* backend : {"shm", "gloo"}) expect_same_as_one_rank({2, 2, 4}, "ZBVZeroBubble", backend);
}

TEST(PipelineSchedule, FailingStageIsNamed) {
  run_ranks(1, [](Rank& me) {
    Blocks model(1);
    const PipelineStage plain = model.stage(0);
    PipelineStage stage(
        [plain, calls = 0](const at::Tensor& x) mutable {
          TESSERA_CHECK(++calls < 3, UsageError, "planted");
          return plain.forward(x);
        },
        plain.parameters(), 0, 1);
    ScheduleGPipe pipeline({stage}, 4, squared_error, me.group());
    EXPECT_ERROR(UsageError, pipeline.step(model.input, model.target), "planted", "0F2", "GPipe");
  });
}

TEST(PipelineSchedule, AnErrorNamesTheActionsThatARankWaitsFor) {
  const std::vector<int64_t> global_ranks = {4, 6, 8};
  EXPECT_EQ(awaited_actions({0, 1, 2}, 2, 3, true, global_ranks), "1SEND_F3 of rank 6, which needs 0SEND_F3 of rank 4");
  EXPECT_EQ(awaited_actions({0, 1, 2}, 1, 0, false, global_ranks),
            "2SEND_B0 of rank 8, which needs 1SEND_F0 of rank 6, which needs 0SEND_F0 of rank 4");
  EXPECT_EQ(awaited_actions({0, 1, 1, 0}, 3, 2, true, {0, 1}), "2SEND_F2 of rank 1, which needs 0SEND_F2 of rank 0");
}

// Three stages on three ranks; the one in the middle fails in its third forward. Whatever it throws, all ranks learn
// the action.
TEST(PipelineSchedule, FailingRankIsNamedWithItsActionOnAllRanks) {
  for (const bool of_torch : {true, false}) {
    std::string all;
    try {
      run_ranks(3, [&](Rank& me) {
        Blocks model(3);
        const PipelineStage plain = model.stage(me.rank);
        PipelineStage stage(
            [plain, of_torch, rank = me.rank, calls = 0](const at::Tensor& x) mutable {
              if (rank == 1 && ++calls == 3) {
                TESSERA_CHECK(!of_torch, UsageError, "planted");
                throw std::runtime_error("planted");
              }
              return plain.forward(x);
            },
            plain.parameters(), me.rank, 3);
        ScheduleGPipe pipeline({stage}, 4, squared_error, me.group());
        pipeline.step(model.input, model.target);
      });
    } catch (const std::exception& error) {
      all = error.what();
    }
    EXPECT_CONTAINS(all, "3 of 3 ranks failed");
    EXPECT_CONTAINS(all, "planted");
    EXPECT_CONTAINS(all, "in the action 1F2 of rank 1");
    EXPECT_CONTAINS(all, "of rank 1, which needs 0SEND_F");  // rank 2 waits for rank 1, which waits for rank 0
  }
}

// A rank that is killed in its third forward: the peers tell the action that it began.
TEST(PipelineSchedule, KilledRankIsNamedWithItsAction) {
  std::string all;
  try {
    tessera::testing::spawn_ranks(3,
                                  [&](Rank& me) {
                                    Blocks model(3);
                                    const PipelineStage plain = model.stage(me.rank);
                                    PipelineStage stage(
                                        [plain, rank = me.rank, calls = 0](const at::Tensor& x) mutable {
                                          if (rank == 1 && ++calls == 3) raise(SIGKILL);
                                          return plain.forward(x);
                                        },
                                        plain.parameters(), me.rank, 3);
                                    ScheduleGPipe pipeline({stage}, 4, squared_error, me.group());
                                    pipeline.step(model.input, model.target);
                                  },
                                  {.backend = "shm"});
  } catch (const std::exception& error) {
    all = error.what();
  }
  EXPECT_CONTAINS(all, "1F2");
}

TEST(PipelineSchedule, StagesThatTheScheduleDoesNotGiveAreRefused) {
  run_ranks(2, [](Rank& me) {
    Blocks model(4);
    const std::vector<PipelineStage> looped = {model.stage(me.rank), model.stage(me.rank + 2)};
    EXPECT_ERROR(UsageError, ScheduleZBVZeroBubble(looped, 4, squared_error, me.group()), "ZBVZeroBubble",
                 me.rank == 0 ? "the stages 0, 3, and it has 0, 2" : "the stages 1, 2, and it has 1, 3",
                 "build_stages()");
    EXPECT_ERROR(UsageError, Schedule1F1B(looped, 4, squared_error, me.group()), "one stage per rank",
                 "Interleaved1F1B");
    EXPECT_ERROR(UsageError, Schedule1F1B({looped[0]}, 4, squared_error, me.group()), "has 2 stages", "the model has 4",
                 "Split the model into 2 stages");
    EXPECT_ERROR(UsageError, PipelineSchedule("1F2B", looped, 4, squared_error, me.group()), "1F2B", "1F1B");
    EXPECT_ERROR(UsageError, ScheduleInterleaved1F1B(looped, 3 + me.rank, squared_error, me.group()),
                 "disagree about the number of microbatches: rank 0 has 3 and rank 1 has 4");
    EXPECT_ERROR(UsageError, ScheduleDualPipeV(looped, 3, squared_error, me.group()), "at least as many microbatches");
    ScheduleInterleaved1F1B pipeline(looped, 4, squared_error, me.group());
    if (me.rank == 0)
      EXPECT_ERROR(UsageError, pipeline.step(model.input.slice(0, 0, 3), model.target), "3 rows", "4 microbatches");
    ScheduleInterleaved1F1B without_loss(looped, 4, {}, me.group());
    EXPECT_ERROR(UsageError, without_loss.step(model.input, model.target), "loss_fn", "eval()");
  });
  EXPECT_ERROR(UsageError, PipelineStage([](const at::Tensor& x) { return x; }, {}, 2, 2), "stage 2 of 2 stages");
}

TEST(PipelineSchedule, TableOfTheUser) {
  run_ranks(2, [](Rank& me) {
    const auto with = [&](const std::string& csv) {
      Blocks model(2);
      return ScheduleGPipe({model.stage(me.rank)}, 2, squared_error, me.group(), {.csv = csv});
    };
    Blocks model(2);
    with("0F0,0F1,0I0,0W0,0B1\n,1F0,1B0,1F1,1I1,1W1\n").step(model.input, model.target);
    EXPECT_ERROR(UsageError, with("0F0,0F1,0B0,0B1\n"), "1 lines for 2 ranks");
    EXPECT_ERROR(UsageError, with("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n"), "no 1B1");
    EXPECT_ERROR(UsageError, with("0F0,0F1,0I0,0B1\n1F0,1F1,1B0,1B1\n"), "no 0W0");
    EXPECT_ERROR(UsageError, with("0F0,0F1,0B0,0B1\n1F0,1F1,1F1,1B0,1B1\n"), "1F1 of rank 1 twice");
    EXPECT_ERROR(UsageError, with("0B0,0F0,0F1,0B1\n1F0,1F1,1B0,1B1\n"), "0B0 of rank 0 before its forward");
    EXPECT_ERROR(UsageError, with("0F0,0F1,0B0,0B1,1F0\n1F0,1F1,1B0,1B1\n"), "Write each stage on one rank");
    EXPECT_ERROR(UsageError, with("0F0,0F1,0F2\n1F0,1F1\n"), "0F2", "2 microbatches");
    EXPECT_ERROR(UsageError, with("0F0,0SEND_F0\n1F0\n"), "0SEND_F0", "compute actions only");
    EXPECT_ERROR(UsageError, with("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"), "waits for ever");
    EXPECT_ERROR(UsageError, with("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1X1\n"), "1X1");
  });
}

// PyTorch's tests run such tables too (schedule_registry.py): stages in the shape of a V, ranks with different numbers
// of stages and neighbouring stages on one rank, weight gradients late and in another order.
TEST(PipelineSchedule, TablesWithOtherStagesPerRank) {
  struct TableCase {
    int64_t stages;
    const char* csv;
  };
  for (const TableCase& each : {TableCase{4,
                                          "0F0,0F1,3F0,3I0,3F1,3I1,0I0,0I1,3W1,0W1,3W0,0W0\n"
                                          ",1F0,1F1,2F0,2F1,2I0,1I0,2I1,1I1,1W0,2W0,2W1,1W1\n"},
                                TableCase{5,
                                          "0F0,1F0,0F1,1F1,4F0,4B0,4F1,4I1,1B0,0I0,4W1,1B1,0B1,0W0\n"
                                          "2F0,3F0,2F1,3F1,3B0,2B0,3I1,2B1,3W1\n"}})
    run_ranks(2, [&](Rank& me) {
      Blocks plain(each.stages), model(each.stages);
      const std::vector<at::Tensor> targets = plain.target.tensor_split(2);
      std::vector<at::Tensor> losses;
      for (const at::Tensor& rows : plain.input.tensor_split(2)) {
        at::Tensor x = rows;
        for (int64_t i = 0; i < each.stages; ++i) x = plain.stage(i).forward(x);
        losses.push_back(squared_error(x, targets[losses.size()]));
        (losses.back() / 2).backward();
      }
      std::vector<PipelineStage> mine;
      for (int64_t i = 0; i < each.stages; ++i) {
        const bool of_rank_0 = i == 0 || i == each.stages - 1 || (each.stages == 5 && i == 1);
        if (of_rank_0 == (me.rank == 0)) mine.push_back(model.stage(i));
      }
      ScheduleGPipe pipeline(mine, 2, squared_error, me.group(), {.csv = each.csv});
      const std::vector<at::Tensor> found = pipeline.step(model.input, model.target);
      ASSERT_EQ(found.size(), me.rank == 0 ? 2 : 0);
      for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].allclose(losses[i], 1e-9, 1e-9));
      for (const PipelineStage& stage : mine) {
        const std::vector<at::Tensor> expected = plain.stage(stage.stage_index()).parameters();
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(stage.parameters()[i].grad().allclose(expected[i].grad(), 1e-9, 1e-9))
              << each.stages << " stages, stage " << stage.stage_index() << " parameter " << i;
      }
    });
}

// PyTorch: test_eval_inference_mode, test_schedule_eval_then_train.
TEST(PipelineSchedule, EvaluatesInInferenceModeAndTrainsAfterwards) {
  for (const std::string& name : schedule_names())
    run_ranks(2, [&](Rank& me) {
      const PipelineShape shape{2, name == "GPipe" || name == "1F1B" ? 1 : 2, 4};
      Blocks model(shape.stages());
      std::vector<PipelineStage> mine;
      const std::vector<int64_t> rank_of = stage_ranks(name, shape);
      for (int64_t i = 0; i < shape.stages(); ++i)
        if (rank_of[i] == me.rank) mine.push_back(model.stage(i));
      PipelineSchedule pipeline(name, mine, 4, squared_error, me.group());
      at::Tensor expected = model.input, found;
      {
        const c10::InferenceMode inference;
        for (int64_t i = 0; i < shape.stages(); ++i) expected = model.stage(i).forward(expected);
        found = pipeline.eval(model.input);
      }
      ASSERT_EQ(found.defined(), rank_of.back() == me.rank) << name;
      EXPECT_TRUE(!found.defined() || found.allclose(expected, 1e-12, 1e-12)) << name;
      pipeline.step(model.input, model.target);
      for (const PipelineStage& stage : mine)
        for (const at::Tensor& parameter : stage.parameters()) EXPECT_TRUE(parameter.grad().defined()) << name;
    });
}

// PyTorch: test_replicate_pp, test_replicate_pp_grads. DDP averages after each backward; the sums are the same.
TEST(PipelineSchedule, ReplicatedStagesHaveTheAveragedGradients) {
  for (const std::string name : {"1F1B", "Interleaved1F1B"})
    run_ranks(4, [&](Rank& me) {
      const DeviceMesh mesh = me.mesh("dp=2,pp=2");
      const PipelineShape shape{2, name == "1F1B" ? 1 : 2, 4};
      Blocks plain(shape.stages()), model(shape.stages());
      for (int64_t replica = 0; replica < 2; ++replica) {  // each has other rows
        const at::Tensor rows = plain.input + replica;
        const std::vector<at::Tensor> targets = plain.target.tensor_split(4);
        std::vector<at::Tensor> inputs = rows.tensor_split(4);
        for (size_t i = 0; i < inputs.size(); ++i) {
          at::Tensor x = inputs[i];
          for (int64_t stage = 0; stage < shape.stages(); ++stage) x = plain.stage(stage).forward(x);
          (squared_error(x, targets[i]) / 8).backward();
        }
      }
      std::vector<PipelineStage> mine;
      const std::vector<int64_t> rank_of = stage_ranks(name, shape);
      const int64_t pp_rank = mesh.get_local_rank("pp"), replica = mesh.get_local_rank("dp");
      for (int64_t i = 0; i < shape.stages(); ++i)
        if (rank_of[i] == pp_rank) mine.push_back(model.stage(i));
      for (PipelineStage& stage : mine) replicate(stage.module(), {{.device_mesh = mesh["dp"]}});
      PipelineSchedule pipeline(name, mine, 4, squared_error, mesh.get_group("pp"));
      pipeline.step(model.input + replica, model.target);
      for (const PipelineStage& stage : mine) {
        const std::vector<at::Tensor> expected = plain.stage(stage.stage_index()).parameters();
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(stage.parameters()[i].grad().allclose(expected[i].grad(), 1e-9, 1e-9))
              << name << " stage " << stage.stage_index() << " parameter " << i;
      }
    });
}

// I and W are separate backward passes, in which a reducer finds parameters without gradient.
TEST(PipelineSchedule, ReplicatedStagesAreRefusedByZeroBubble) {
  run_ranks(4, [&](Rank& me) {
    const DeviceMesh mesh = me.mesh("dp=2,pp=2");
    Blocks model(4);
    const int64_t pp_rank = mesh.get_local_rank("pp");
    std::vector<PipelineStage> replicated = {model.stage(pp_rank), model.stage(pp_rank + 2)};
    for (PipelineStage& stage : replicated) replicate(stage.module(), {{.device_mesh = mesh["dp"]}});
    EXPECT_ERROR(UsageError, ScheduleInterleavedZeroBubble(replicated, 4, squared_error, mesh.get_group("pp")),
                 "InterleavedZeroBubble computes the gradients of inputs and of parameters in separate passes",
                 c10::str("stage ", pp_rank, " has a module of replicate()"), "average_gradients(stage, mesh[\"dp\"])");
    const auto wrapped = [&](int64_t stage) {
      return PipelineStage(DistributedDataParallel(nn::Linear(4, 4), {.device_mesh = mesh["dp"]}), stage, 4);
    };
    EXPECT_ERROR(
        UsageError,
        ScheduleInterleavedZeroBubble({wrapped(pp_rank), wrapped(pp_rank + 2)}, 4, squared_error, mesh.get_group("pp")),
        "average_gradients");
  });
}

// Stages have different parameters, so the ranks of a pipeline agree whether to skip a step: max of found_inf.
TEST(PipelineSchedule, LossScalingSkipsAStepOnAllStages) {
  run_ranks(2, [](Rank& me) {
    Blocks model(2), plain(2);
    const PipelineStage stage = model.stage(me.rank);
    optim::SGD optimizer(stage.parameters(), optim::SGDOptions{.lr = 0.1});
    optim::GradScaler scaler({.init_scale = 1024});
    Schedule1F1B pipeline(
        {stage}, 4, [&](const at::Tensor& y, const at::Tensor& t) { return scaler.scale(squared_error(y, t)); },
        me.group());
    const auto step = [&](bool overflows) {
      optimizer.zero_grad();
      pipeline.step(model.input, model.target);
      if (overflows && me.rank == 0) stage.parameters()[0].mutable_grad().fill_(INFINITY);  // in one stage only
      scaler.unscale_(optimizer);
      at::Tensor found_inf = scaler.found_inf(optimizer);
      me.group()->all_reduce(found_inf, ReduceOp::Max).wait();
      scaler.step(optimizer);
      scaler.update();
    };
    const auto before = stage.parameters()[0].detach().clone();
    step(/*overflows=*/true);
    EXPECT_TRUE(stage.parameters()[0].equal(before)) << "rank " << me.rank;
    EXPECT_EQ(scaler.get_scale(), 512);
    step(/*overflows=*/false);
    at::Tensor x = plain.input;
    const std::vector<at::Tensor> targets = plain.target.tensor_split(4);
    std::vector<at::Tensor> inputs = x.tensor_split(4);
    for (size_t i = 0; i < inputs.size(); ++i)
      (squared_error(plain.stage(1).forward(plain.stage(0).forward(inputs[i])), targets[i]) / 4).backward();
    const auto expected = before - 0.1 * plain.stage(me.rank).parameters()[0].grad();
    EXPECT_TRUE(stage.parameters()[0].allclose(expected, 1e-9, 1e-9)) << "rank " << me.rank;
  });
}

// PyTorch: test_output_chunks_memory_usage.
TEST(PipelineSchedule, NothingOfAStepIsKept) {
  for (const std::string name : {"GPipe", "1F1B"})
    run_ranks(2, [&](Rank& me) {
      Blocks model(2);
      const PipelineStage plain = model.stage(me.rank);
      std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> outputs;
      PipelineStage stage(
          [&](const at::Tensor& x) {
            at::Tensor y = plain.forward(x);
            outputs.push_back(y.storage().getWeakStorageImpl());
            return y;
          },
          plain.parameters(), me.rank, 2);
      PipelineSchedule pipeline(name, {stage}, 4, squared_error, me.group());
      const auto losses = pipeline.step(model.input, model.target);
      EXPECT_EQ(outputs.size(), 4);
      me.group()->barrier().wait();  // what was sent has arrived
      for (const auto& output : outputs) EXPECT_TRUE(output.expired()) << name << " rank " << me.rank;
    });
}

// PyTorch: wrong shapes and dtypes in test_stage.py. The stage that cannot take its input says so, with its action.
TEST(PipelineSchedule, WrongInputsAndOutputsAreNamed) {
  const auto errors_of = [](const std::function<at::Tensor(const at::Tensor&)>& input,
                            const std::function<at::Tensor(const at::Tensor&)>& output) {
    std::string all;
    try {
      run_ranks(2, [&](Rank& me) {
        Blocks model(2);
        const PipelineStage plain = model.stage(me.rank);
        PipelineStage stage(
            [=, rank = me.rank](const at::Tensor& x) {
              return rank == 0 ? output(plain.forward(x)) : plain.forward(x);
            },
            plain.parameters(), me.rank, 2);
        ScheduleGPipe({stage}, 4, squared_error, me.group()).step(input(model.input), model.target);
      });
    } catch (const std::exception& error) {
      all = error.what();
    }
    return all;
  };
  const auto same = [](const at::Tensor& x) { return x; };
  EXPECT_CONTAINS(errors_of([](const at::Tensor& x) { return x.to(torch::kInt); }, same),
                  "in the action 0F0 of rank 0");
  EXPECT_CONTAINS(errors_of([](const at::Tensor& x) { return x.narrow(1, 0, 5); }, same),
                  "in the action 0F0 of rank 0");
  EXPECT_CONTAINS(errors_of(same, [](const at::Tensor& x) { return x.flatten(); }), "in the action 1F0 of rank 1");
  EXPECT_CONTAINS(errors_of(same, [](const at::Tensor& x) { return x.to(torch::kBFloat16); }),
                  "in the action 1F0 of rank 1");
}

TEST(PipelineSchedule, ProfileMeasuresEveryStage) {
  run_ranks(2, [](Rank& me) {
    Blocks model(4), stepped(4);
    const auto schedule_of = [&](Blocks& blocks) {
      return ScheduleInterleavedZeroBubble({blocks.stage(me.rank), blocks.stage(me.rank + 2)}, 4, squared_error,
                                           me.group());
    };
    auto schedule = schedule_of(model);
    const ScheduleProfile profile = schedule.profile(model.input, model.target);
    ASSERT_EQ(profile.stages.size(), 4);
    for (size_t stage = 0; stage < 4; ++stage) {
      const StageCost& cost = profile.stages[stage];
      EXPECT_GT(cost.forward, 0);
      EXPECT_GT(cost.backward_input + cost.backward_weight, 0);
      // Microbatches of 11 / 4 rows, in float64. A block keeps its input (6), the inputs of GELU and of the second
      // Linear (12 each) and of LayerNorm (6), and LayerNorm's mean and deviation (1 each). The input of the first
      // stage is the batch of the caller.
      EXPECT_DOUBLE_EQ(cost.activation, 11.0 / 4 * ((stage > 0 ? 6 : 0) + 12 + 12 + 6 + 2) * 8);
    }
    const Simulation& simulation = profile.simulation;
    EXPECT_GT(simulation.seconds, 0);
    ASSERT_EQ(simulation.ranks.size(), 2);
    EXPECT_GE(simulation.ranks[0].peak, profile.stages[0].activation);
    EXPECT_CONTAINS(to_svg(simulation), "<svg");
    // The step was a step.
    schedule_of(stepped).step(stepped.input, stepped.target);
    for (const int64_t stage : {me.rank, me.rank + 2})
      for (size_t i = 0; i < model.stage(stage).parameters().size(); ++i)
        EXPECT_TRUE(model.stage(stage).parameters()[i].grad().equal(stepped.stage(stage).parameters()[i].grad()));

    const Simulation other = schedule.profile(model.input, model.target, "zbvzerobubble").simulation;
    EXPECT_EQ(other.ranks[0].actions.back().action.stage, 0);
    EXPECT_ERROR(UsageError, schedule.profile(model.input, model.target, "GPipe"), "one stage per rank");
  });
}

}  // namespace
}  // namespace tessera::pipelining
