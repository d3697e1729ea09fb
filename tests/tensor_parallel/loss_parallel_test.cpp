// The losses that LossParallel changes, and those that it does not change.
#include "tessera/tensor_parallel/loss_parallel.h"

#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

namespace tessera {
namespace {

namespace F = torch::nn::functional;
using testing::close;
using testing::Rank;
using testing::run_ranks;

// The number of collectives of a call.
struct Comms {
  int64_t all_reduces, all_gathers;
  bool operator==(const Comms&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Comms& c) {
  return out << c.all_reduces << " all-reduces, " << c.all_gathers << " all-gathers";
}
template <class Call>
Comms comms_of(Call call) {
  CommDebugMode mode;
  call();
  const auto& counts = mode.get_comm_counts();
  return {counts.of(comm::CommKind::AllReduce), counts.of(comm::CommKind::AllGather)};
}

// The same values on every rank. Thread ranks share the generator of the process, so the values are generated once.
struct Numbers {
  at::Tensor logits = torch::randn({6, 10}), weight = torch::rand({10}) + 0.5;
  at::Tensor target = torch::randint(10, {6}, torch::kLong);
};
const Numbers& numbers() {
  static const Numbers once = (torch::manual_seed(1), Numbers());
  return once;
}

struct Inputs {
  at::Tensor plain = numbers().logits, weight = numbers().weight, target = numbers().target;
  at::Tensor sharded;  // [S(1)] on tp
  explicit Inputs(Rank& me)
      : sharded(distribute_tensor(plain, me.mesh({me.size()}, {"tp"}), {Shard(1)}).set_requires_grad(true)) {}
};

TEST(LossParallel, ChangesCrossEntropyOnlyInTheScope) {
  for (int n : {2, 3, 4})
    run_ranks(n, [](Rank& me) {
      const Inputs in(me);
      const auto expected = F::cross_entropy(in.plain, in.target);
      at::Tensor loss;
      {
        LossParallel scope;
        EXPECT_EQ(comms_of([&] { loss = F::cross_entropy(in.sharded, in.target); }), (Comms{3, 0}));
        EXPECT_EQ(close(DTensor(loss).full_tensor(), expected, {1e-6, 1e-6}), "");
        EXPECT_EQ(comms_of([&] { loss.backward(); }), (Comms{0, 0}));
        { LossParallel inner; }
        EXPECT_EQ(comms_of([&] { torch::nn::CrossEntropyLoss()(in.sharded, in.target); }), (Comms{3, 0}));
        EXPECT_EQ(comms_of([&] { torch::cross_entropy_loss(in.sharded, in.target); }), (Comms{3, 0}));
        c10::InferenceMode inference;
        EXPECT_EQ(comms_of([&] { torch::cross_entropy_loss(in.sharded.detach(), in.target); }), (Comms{3, 0}));
      }
      const auto target = distribute_tensor(in.target, DTensor(in.sharded).device_mesh(), {Replicate()});
      EXPECT_NE(comms_of([&] { loss = F::cross_entropy(in.sharded, target); }), (Comms{3, 0}));
      EXPECT_EQ(close(DTensor(loss).full_tensor(), expected, {1e-6, 1e-6}), "");
    });
}

TEST(LossParallel, PassesEveryOption) {
  run_ranks(2, [](Rank& me) {
    const Inputs in(me);
    const auto options = F::CrossEntropyFuncOptions()
                             .weight(in.weight)
                             .ignore_index(in.target[2].item<int64_t>())
                             .reduction(torch::kSum)
                             .label_smoothing(0.2);
    LossParallel scope;
    EXPECT_EQ(close(DTensor(F::cross_entropy(in.sharded, in.target, options)).full_tensor(),
                    F::cross_entropy(in.plain, in.target, options), {1e-6, 1e-6}),
              "");
  });
}

// nll_loss of sharded log-probabilities exchanges one value per position.
TEST(LossParallel, ChangesNllLoss) {
  run_ranks(3, [](Rank& me) {
    const Inputs in(me);
    const auto mesh = DTensor(in.sharded).device_mesh();
    const auto options = F::NLLLossFuncOptions().weight(in.weight).ignore_index(in.target[2].item<int64_t>());
    auto reference = in.plain.log_softmax(1).detach().set_requires_grad(true);
    const auto expected = F::nll_loss(reference, in.target, options);
    expected.backward();
    auto sharded = distribute_tensor(reference.detach(), mesh, {Shard(1)}).set_requires_grad(true);
    LossParallel scope;
    at::Tensor loss;
    EXPECT_EQ(comms_of([&] { loss = F::nll_loss(sharded, in.target, options); }), (Comms{1, 0}));
    EXPECT_EQ(comms_of([&] { loss.backward(); }), (Comms{0, 0}));
    EXPECT_EQ(close(DTensor(loss).full_tensor(), expected, {1e-6, 1e-6}), "");
    EXPECT_EQ(close(DTensor(sharded.grad()).full_tensor(), reference.grad(), {1e-6, 1e-6}), "");
    EXPECT_EQ(comms_of([&] { torch::nll_loss(sharded, in.target); }), (Comms{1, 0}));
    const auto sharded_2d = distribute_tensor(torch::randn({2, 10, 3, 1}).log_softmax(1), mesh, {Shard(1)});
    EXPECT_EQ(comms_of([&] { torch::nll_loss2d(sharded_2d, torch::zeros({2, 3, 1}, torch::kLong)); }), (Comms{1, 0}));
  });
}

TEST(LossParallel, DoesNotChangeOtherCalls) {
  run_ranks(2, [](Rank& me) {
    const Inputs in(me);
    const auto mesh = DTensor(in.sharded).device_mesh();
    const auto replicated = distribute_tensor(in.plain, mesh, {Replicate()});
    const auto target = distribute_tensor(in.target, mesh, {Replicate()});
    const auto probabilities = distribute_tensor(in.plain.softmax(1), mesh, {Replicate()});
    const auto log_softmax = [&] { return torch::log_softmax(in.sharded, 1); };
    const auto of_probabilities = [&] { return F::cross_entropy(in.sharded, probabilities); };
    const auto outside = comms_of(log_softmax), outside_of_probabilities = comms_of(of_probabilities);
    const auto placements = Placements(DTensor(log_softmax()).placements());

    LossParallel scope;
    EXPECT_EQ(comms_of(log_softmax), outside);
    EXPECT_EQ(Placements(DTensor(log_softmax()).placements()), placements);
    EXPECT_EQ(close(DTensor(log_softmax()).full_tensor(), in.plain.log_softmax(1)), "");
    EXPECT_EQ(comms_of(of_probabilities), outside_of_probabilities);
    EXPECT_EQ(close(DTensor(of_probabilities()).full_tensor(), F::cross_entropy(in.plain, in.plain.softmax(1))), "");
    EXPECT_EQ(comms_of([&] { F::cross_entropy(replicated, target); }), (Comms{0, 0}));
    EXPECT_TRUE(torch::equal(F::cross_entropy(in.plain, in.target),
                             at::nll_loss(in.plain.log_softmax(1), in.target)));  // plain tensors
  });
}

TEST(LossParallel, BackwardWorksOutsideOfTheScopeAndInAnotherThread) {
  run_ranks(2, [](Rank& me) {
    const Inputs in(me);
    at::Tensor loss;
    {
      LossParallel scope;
      loss = F::cross_entropy(in.sharded, in.target);
    }
    std::thread([&] { loss.backward(); }).join();
    auto plain = in.plain.clone().set_requires_grad(true);
    F::cross_entropy(plain, in.target).backward();
    EXPECT_EQ(close(DTensor(in.sharded.grad()).full_tensor(), plain.grad(), {1e-6, 1e-6}), "");
  });
}

}  // namespace
}  // namespace tessera
