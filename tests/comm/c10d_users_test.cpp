// Code written for c10d, over Tessera's backends: DDP's reducer, ProcessGroupWrapper. And c10d process groups in
// Tessera.
#define USE_C10D_GLOO 1  // otherwise the header of ProcessGroupWrapper is empty
#include "tessera/base/detail/libtorch_compat.h"
#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/spawn.h"

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace tessera {
namespace {

using testing::Rank;
using testing::spawn_ranks;
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Reduces a bucket in bfloat16. It uses the future only, and never waits for the work.
struct Bf16Hook : c10d::CppCommHookInterface<ProcessGroupPtr> {
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    at::Tensor buffer = bucket.getBufferRef();
    std::vector<at::Tensor> small{buffer.to(at::kBFloat16).div_(state_->getSize())};
    return state_->allreduce(small)->getFuture()->then(
        [buffer, small](c10::ivalue::Future&) -> c10::IValue {
          at::NoGradGuard no_grad;
          buffer.copy_(small[0]);
          return buffer;
        },
        c10::TensorType::get());
  }
};

enum class Hook { None, Bf16, Fp16Builtin };

// Three steps of a small net, with one batch per rank. The gradients must be the mean over the ranks.
void train(Rank& me, Hook hook) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(16, 300), torch::nn::ReLU(), torch::nn::Linear(300, 300),
                            torch::nn::ReLU(), torch::nn::Linear(300, 4));
  const auto parameters = net->parameters();
  std::vector<at::Tensor> expected;  // every rank computes the gradients of all batches
  const auto loss_of = [&](int64_t rank) {
    return net->forward(torch::ones({8, 16}) * (0.1 * (rank + 1))).sin().sum();
  };
  for (int64_t r = 0; r < me.size(); r++) {
    const auto gradients = torch::autograd::grad({loss_of(r)}, parameters);
    for (size_t i = 0; i < gradients.size(); i++)
      r == 0 ? expected.push_back(gradients[i].clone()) : (void)expected[i].add_(gradients[i]);
  }
  for (auto& gradient : expected) gradient.div_(me.size());

  auto group = me.group()->process_group();
  constexpr int64_t kBucket = 64 << 10;  // several buckets, so that communication overlaps with backward
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, {kBucket}));
  std::reverse(buckets.begin(), buckets.end());
  auto reducer = std::make_shared<c10d::Reducer>(parameters, buckets, group, std::vector<bool>(), kBucket,
                                                 /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/false,
                                                 std::unordered_map<size_t, std::string>(), kBucket,
                                                 /*skip_all_reduce_unused_params=*/false,
                                                 /*use_python_reducer=*/false, std::vector<int64_t>());
  if (hook == Hook::Bf16) reducer->register_comm_hook(std::make_unique<Bf16Hook>(group));
  if (hook == Hook::Fp16Builtin) reducer->register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
  for (int step = 0; step < 3; step++) {
    for (const auto& p : parameters) p.mutable_grad().reset();
    reducer->prepare_for_forward();
    reducer->rebuild_buckets();
    const auto loss = loss_of(me.rank);
    reducer->prepare_for_backward({});
    loss.backward();
    const testing::Tolerance tolerance = hook == Hook::None ? testing::Tolerance{} : testing::Tolerance{2e-2, 2e-2};
    for (size_t i = 0; i < parameters.size(); i++)
      EXPECT_EQ(testing::close(parameters[i].grad(), expected[i], tolerance), "") << "parameter " << i;
  }
}

TEST(C10dUsers, ReducerAveragesGradients) {
  spawn_ranks(2, [](Rank& me) { train(me, Hook::None); }, {.backend = "shm"});
}
TEST(C10dUsers, ReducerWithAHookThatChainsFutures) {
  spawn_ranks(3, [](Rank& me) { train(me, Hook::Bf16); }, {.backend = "shm"});
}
TEST(C10dUsers, ReducerWithABuiltinHook) {
  spawn_ranks(2, [](Rank& me) { train(me, Hook::Fp16Builtin); }, {.backend = "shm"});
}

c10::intrusive_ptr<c10d::Backend> connect_gloo(Rank& me) {
  comm::ConnectOptions options;
  const int64_t number = me.world.store()->add(c10::str("gloo/", me.rank), 1);
  options.store = c10::make_intrusive<c10d::PrefixStore>(c10::str("gloo", number), me.world.store());
  options.rank = static_cast<int>(me.rank);
  options.size = static_cast<int>(me.size());
  options.group = "gloo";
  options.ranks = me.group()->ranks();
  options.timeout = std::chrono::seconds(20);
  return comm::connect("gloo", options);
}

TEST(C10dUsers, ProcessGroupWrapperDetectsDifferentShapes) {
  spawn_ranks(2,
              [](Rank& me) {
                auto wrapper = c10::make_intrusive<c10d::ProcessGroupWrapper>(me.group()->backend(), connect_gloo(me));
                std::vector<at::Tensor> xs{at::full({1000}, static_cast<double>(me.rank + 1))};
                wrapper->allreduce(xs)->wait();
                EXPECT_TRUE(xs[0].equal(at::full({1000}, 3.0)));
                at::Tensor all = at::empty({2000}), part = at::empty({500});
                wrapper->_allgather_base(all, xs[0])->wait();
                wrapper->_reduce_scatter_base(part, xs[0], c10d::ReduceScatterOptions())->wait();
                EXPECT_TRUE(all.equal(at::full({2000}, 3.0)) && part.equal(at::full({500}, 6.0)));
                if (libtorch::kAtLeast213) {  // the wrapper of older versions does not have it
                  std::vector<at::Tensor> outs{at::empty({2}), at::empty({4})}, ins{at::ones({1}), at::ones({2})};
                  wrapper->allgather_into_tensor_coalesced(outs, ins)->wait();
                  EXPECT_TRUE(outs[1].equal(at::ones({4})));
                }
                wrapper->broadcast(xs)->wait();
                wrapper->barrier()->wait();
                // Its purpose: different shapes are detected before anything is sent.
                std::vector<at::Tensor> uneven{at::ones({me.rank + 1})};
                EXPECT_THROW(wrapper->allreduce(uneven), c10::Error);
              },
              {.backend = "shm"});
}

// A process group as a program creates it that uses c10d directly. `store` may be null.
ProcessGroupPtr gloo_process_group(Rank& me, c10::intrusive_ptr<c10d::Store> store) {
  auto process_group =
      c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(me.rank), static_cast<int>(me.size()));
  process_group->setBackend(at::kCPU, c10d::ProcessGroup::GLOO, connect_gloo(me));
  process_group->setDefaultBackend(c10d::ProcessGroup::GLOO);
  process_group->setGroupName("gloo");
  return process_group;
}

TEST(GroupFrom, GlooProcessGroupRunsCollectives) {
  spawn_ranks(2, [](Rank& me) {
    const auto process_group = gloo_process_group(me, me.world.store());
    const comm::Group group = group_from(process_group);
    EXPECT_EQ(group->rank(), me.rank);
    EXPECT_EQ(group->ranks(), (std::vector<int64_t>{0, 1}));
    EXPECT_EQ(group->backend_name(), std::string("gloo"));
    EXPECT_EQ(group->timeout(), std::chrono::seconds(20));
    at::Tensor x = at::full({3}, static_cast<double>(me.rank + 1));
    all_reduce(x, ReduceOp::Sum, process_group);
    EXPECT_TRUE(x.equal(at::full({3}, 3.0)));
    comm::require_same_on_all_ranks(group, "test", {"this uses the store of the process group"});
  });
}

TEST(GroupFrom, SameProcessGroupGivesSameGroupAndBack) {
  spawn_ranks(2, [](Rank& me) {
    const auto process_group = gloo_process_group(me, {});
    const comm::Group group = group_from(process_group);
    EXPECT_EQ(group_from(process_group), group);
    EXPECT_EQ(group->process_group(), process_group);
    EXPECT_EQ(group_from(me.group()->process_group()), me.group());
    EXPECT_FALSE(group->store());
    const auto other = gloo_process_group(me, {});
    EXPECT_NE(group_from(other), group);
  });
}

TEST(GroupFrom, NullGivesNull) { EXPECT_FALSE(group_from({})); }

TEST(GroupFrom, ProcessGroupWithoutBackendIsRefused) {
  const auto empty = c10::make_intrusive<c10d::ProcessGroup>(c10::intrusive_ptr<c10d::Store>(), 0, 1);
  EXPECT_THROW(group_from(empty), UsageError);
}

TEST(GroupRef, NotGivenNeedsNoWorldUntilItIsUsed) {
  const GroupRef none, null = comm::Group();
  EXPECT_FALSE(none);
  EXPECT_FALSE(null);
  EXPECT_THROW(none.group(), UsageError);
  EXPECT_THROW(none->size(), UsageError);
  spawn_ranks(1, [&](Rank& me) {
    EXPECT_EQ(GroupRef().group(), me.group());
    EXPECT_TRUE(GroupRef(me.group()));
  });
}

}  // namespace
}  // namespace tessera
