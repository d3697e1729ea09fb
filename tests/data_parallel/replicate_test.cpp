#include "tessera/data_parallel/replicate.h"

#include "tessera/debug/comm_debug_mode.h"
#include "tessera/optim/adam.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tessera/tracing/detail/compiling_scope.h"
#include "tests/fixtures/data_parallel.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;

TEST(Replicate, InPlaceAndLazy) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    if (me.rank == 1) model->layers[0]->bias.data().fill_(3);
    CommDebugMode comm;
    auto handle = replicated(replicate(model));
    EXPECT_EQ(handle.replica(), nullptr);
    EXPECT_EQ(comm.get_total_counts(), 0);  // the setup runs in the first forward
    EXPECT_EQ(model->named_parameters().keys()[0], "net1.weight");
    model(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::Broadcast, comm::Family::C10d), 1);
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce, comm::Family::C10d), 1);
    EXPECT_EQ(comm.get_total_counts(), 2);
    ASSERT_NE(replicated(*model).replica(), nullptr);
    accumulate_means(plain, data, square_loss);
    EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain), kExact), "");
    EXPECT_ERROR(UsageError, clone(model), "replicate() was applied to it");
    EXPECT_ERROR(UsageError, replicate(model), "is replicated already");
  });
}

TEST(Replicate, ReturnsItsArgument) {
  run_ranks(2, [&](Rank&) {
    MLP model(models::mlp_module());
    EXPECT_EQ(&replicate(model), &model);
    MLP other(models::mlp_module());
    Module& module = *other;
    EXPECT_EQ(&replicate(module), &module);
    EXPECT_EQ(replicated(other).replica(), nullptr);
  });
}

// The eager half of PyTorch's test of replicate with a compiler: two iterations of Adam, with and without
// synchronization in the first, compared with plain training. From the second iteration on there are two more buckets.
TEST(Replicate, TrainsLikeThePlainModule) {
  const MLP start(models::four_linears(64));
  std::vector<Tensors> steps;
  for (int i = 0; i < 4; i++) steps.push_back(batches(2, {1, 64}, 123 + i));
  for (const bool no_sync : {false, true})
    run_ranks(2, [&](Rank& me) {
      auto plain = clone(start), model = clone(start);
      auto handle = replicated(replicate(model, {{.bucket_cap_mb = 20000.0 / (1 << 20)}}));
      optim::Adam plain_opt(plain->parameters(), {}), opt(model->parameters(), {});
      for (int i = 0; i < 4; i++) {
        const auto& data = steps[static_cast<size_t>(i)];
        const bool sync = !no_sync || i % 2 == 1;
        handle.set_requires_gradient_sync(sync);
        CommDebugMode comm;
        model(data[static_cast<size_t>(me.rank)]).sum().backward();
        const int64_t buckets = i == 0 || (no_sync && i == 1) ? 1 : 2;
        EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce, comm::Family::C10d), sync ? buckets : 0) << i;
        for (const auto& batch : data) (plain(batch).sum() * 0.5).backward();
        if (!sync) continue;
        EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain)), "") << i;
        for (auto* o : {&plain_opt, &opt}) {
          o->step();
          o->zero_grad();
        }
      }
      EXPECT_EQ(close(values_of(*model), values_of(*plain)), "");
    });
}

TEST(Replicate, IgnoredModulesAreNotAveraged) {
  const models::MLPStacked start;
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start), plain = clone(start);
    const auto ignored = get_submodule(*model, "layers.1");
    replicate(model, {{}, {ignored.get()}});
    const auto& batch = data[static_cast<size_t>(me.rank)];
    model(batch).sum().backward();
    plain(batch).sum().backward();  // local gradients
    EXPECT_EQ(close(get_parameter(*model, "layers.1.net1.weight").grad(),
                    get_parameter(*plain, "layers.1.net1.weight").grad(), kExact),
              "");
    EXPECT_NE(close(get_parameter(*model, "layers.0.net1.weight").grad(),
                    get_parameter(*plain, "layers.0.net1.weight").grad(), kExact),
              "");
  });
}

TEST(Replicate, CommHooksAreAppliedInTheFirstForward) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    int called = 0;
    replicated(replicate(model)).register_comm_hook(&called, [](int* n, GradBucket& bucket) {
      ++*n;
      return allreduce_hook(nullptr, bucket);
    });
    EXPECT_EQ(called, 0);
    model(data[static_cast<size_t>(me.rank)]).sum().backward();
    EXPECT_EQ(called, 1);
  });
}

// One all-reduce per parameter, which a compiler can group.
TEST(ReducerMode, OneAllReducePerParameter) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    const auto& batch = data[static_cast<size_t>(me.rank)];
    auto plain = clone(start), always = clone(start), compiled = clone(start), eager = clone(start);
    {
      const ReducerModeScope mode(ReducerMode::PerParameterAlways);
      replicate(always);
    }
    {
      const ReducerModeScope mode(ReducerMode::PerParameter);
      replicate(compiled);
      replicate(eager);
    }
    accumulate_means(plain, data, square_loss);
    const auto run = [&](MLP& model, int64_t functional, int64_t c10d) {
      CommDebugMode comm;
      model(batch).pow(2).mean().backward();
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce), functional);
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce, comm::Family::C10d), c10d);
      EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain), kExact), "");
    };
    run(always, 4, 0);
    {
      const CompilingScope compiling;
      run(compiled, 4, 0);
    }
    run(eager, 0, 1);
    eager->zero_grad();
    run(eager, 0, 1);  // rebuilds the buckets, which a trace would do before it starts again
    eager->zero_grad();
    const CompilingScope compiling;  // no effect: the first forward was eager
    run(eager, 0, 1);
  });
}

TEST(ReducerMode, HooksAndSync) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    const ReducerModeScope mode(ReducerMode::PerParameterAlways);
    auto plain = clone(start), model = clone(start);
    auto handle = replicated(replicate(model));
    handle.register_comm_hook(nullptr, bf16_compress_hook);
    handle.set_requires_gradient_sync(false);
    const auto& batch = data[static_cast<size_t>(me.rank)];
    auto loss = model(batch).pow(2).mean();  // the first forward broadcasts the parameters
    CommDebugMode comm;
    loss.backward();
    EXPECT_EQ(comm.get_total_counts(), 0);
    handle.set_requires_gradient_sync(true);
    model(batch).pow(2).mean().backward();
    EXPECT_EQ(comm.get_total_counts(), 4);
    EXPECT_EQ(comm.get_bytes_by_axis().begin()->second, (160 + 16 + 160 + 10) * 2);
    for (int i = 0; i < 2; i++)
      for (const auto& x : data) (plain(x).pow(2).mean() * 0.5).backward();
    EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain), {1.6e-2, 1e-4}), "");
  });
}

}  // namespace
}  // namespace tessera
