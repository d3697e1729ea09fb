#include "tessera/nn/checkpoint.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/comm/world.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/saved_tensor_hooks.h"
#include "tessera/testing/detail/counting_allocator.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <stdexcept>

namespace tessera {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

// Runs `step`, which ends with a backward, and returns the gradients of the parameters.
template <class Step>
Tensors grads_of(const Tensors& parameters, Step step) {
  for (const auto& p : parameters) p.mutable_grad().reset();
  step();
  Tensors grads;
  for (const auto& p : parameters) grads.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
  return grads;
}

void expect_same_bits(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); i++) {
    ASSERT_TRUE(a[i].defined() && b[i].defined()) << i;
    EXPECT_TRUE(a[i].equal(b[i])) << i;
  }
}

torch::nn::Sequential mlp(int64_t width = 8) {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                               torch::nn::Linear(4 * width, width));
}

TEST(Checkpoint, AnMlpHasTheSameOutputAndGradients) {
  auto net = mlp();
  auto x = torch::rand({4, 8}, torch::requires_grad());
  auto all = net->parameters();
  all.push_back(x);
  at::Tensor plain, checkpointed;
  int runs = 0;
  const auto expected = grads_of(all, [&] { (plain = net->forward(x)).square().sum().backward(); });
  const auto got = grads_of(all, [&] {
    checkpointed = checkpoint(
        [&](const at::Tensor& x) {
          runs++;
          EXPECT_EQ(recomputing(), runs == 2);
          return net->forward(x);
        },
        x);
    checkpointed.square().sum().backward();
  });
  EXPECT_TRUE(plain.equal(checkpointed));
  expect_same_bits(expected, got);
  EXPECT_EQ(runs, 2);
  EXPECT_TRUE(detail::packers().empty());
  EXPECT_FALSE(recomputing());
}

// A transformer block with dropout.
struct Block {
  torch::nn::LayerNorm norm1{torch::nn::LayerNormOptions({8})}, norm2{torch::nn::LayerNormOptions({8})};
  torch::nn::Linear qkv{8, 24}, out{8, 8}, up{8, 32}, down{32, 8};
  Tensors parameters() const {
    Tensors all;
    const auto add = [&](const Tensors& p) { all.insert(all.end(), p.begin(), p.end()); };
    add(norm1->parameters()), add(norm2->parameters()), add(qkv->parameters()), add(out->parameters());
    add(up->parameters()), add(down->parameters());
    return all;
  }
  at::Tensor operator()(const at::Tensor& x) {
    auto parts = qkv(norm1(x)).view({2, 5, 3, 2, 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    auto y = x + torch::dropout(out(mixed.transpose(1, 2).reshape({2, 5, 8})), 0.3, true);
    return y + torch::dropout(down(torch::gelu(up(norm2(y)))), 0.3, true);
  }
};

TEST(Checkpoint, ATransformerBlockWithDropoutHasTheSameGradients) {
  Block block;
  auto x = torch::rand({2, 5, 8}, torch::requires_grad());
  auto all = block.parameters();
  all.push_back(x);
  at::Tensor after_plain, after_checkpointed;
  const auto expected = grads_of(all, [&] {
    torch::manual_seed(3);
    auto y = block(block(x));
    after_plain = torch::rand({3});
    y.square().sum().backward();
  });
  for (const bool early_stop : {true, false}) {
    const auto got = grads_of(all, [&] {
      torch::manual_seed(3);
      auto y = checkpoint({.early_stop = early_stop}, block, checkpoint({.early_stop = early_stop}, block, x));
      const auto loss = y.square().sum();
      after_checkpointed = torch::rand({3});
      const auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
      loss.backward();
      EXPECT_TRUE(state.equal(at::globalContext().defaultGenerator(at::kCPU).get_state()));
    });
    expect_same_bits(expected, got);
    EXPECT_TRUE(after_plain.equal(after_checkpointed));
  }
  // Checks that the test can fail: without the generator state other elements are dropped.
  const auto other = grads_of(all, [&] {
    torch::manual_seed(3);
    checkpoint({.preserve_rng_state = false}, block, x).square().sum().backward();
  });
  const auto once = grads_of(all, [&] {
    torch::manual_seed(3);
    block(x).square().sum().backward();
  });
  EXPECT_FALSE(other.back().equal(once.back()));
}

TEST(Checkpoint, TakesAndReturnsContainersOfTensorsAndOtherValues) {
  auto x = torch::rand({4}, torch::requires_grad());
  const auto fn = [](std::optional<at::Tensor> some, std::vector<at::Tensor> list, const std::string& name, double by,
                     std::optional<at::Tensor> nothing) {
    EXPECT_FALSE(nothing);
    auto y = (*some * list[0]).exp() * by;
    return std::make_tuple(y, name, std::vector<at::Tensor>{y.sin()});
  };
  const auto run = [&](auto&& call) {
    return grads_of({x}, [&] {
      auto [y, name, list] =
          call(std::optional(x * 2), std::vector{x * 3, x}, std::string("n"), 1.5, std::optional<at::Tensor>());
      EXPECT_EQ(name, "n");
      (y + list[0]).sum().backward();
    });
  };
  expect_same_bits(run(fn), run([&](auto&&... args) { return checkpoint(fn, std::forward<decltype(args)>(args)...); }));
}

TEST(Checkpoint, IsAPlainCallWithGradientsDisabled) {
  int runs = 0;
  const auto fn = [&](const at::Tensor& x) {
    runs++;
    EXPECT_TRUE(detail::packers().empty());
    return x.exp();
  };
  torch::NoGradGuard no_grad;
  checkpoint(fn, torch::rand({2}, torch::requires_grad()));
  EXPECT_EQ(runs, 1);
}

TEST(Checkpoint, EarlyStopEndsRecomputationAtTheLastNeededTensor) {
  for (const bool early_stop : {true, false}) {
    int ended = 0;
    auto x = torch::rand({4}, torch::requires_grad());
    checkpoint(
        {.early_stop = early_stop},
        [&](const at::Tensor& x) {
          auto y = x.exp() + 1;
          ended++;
          return y;
        },
        x)
        .sum()
        .backward();
    EXPECT_EQ(ended, early_stop ? 1 : 2);
  }
}

// autograd::grad for one input after the other. Each needs some of the saved tensors.
TEST(Checkpoint, PartialBackwardHasTheSameGradients) {
  auto a = torch::rand({4}, torch::requires_grad()), b = torch::rand({4}, torch::requires_grad());
  int runs = 0;
  const auto fn = [&](const at::Tensor& a, const at::Tensor& b) {
    runs++;
    return std::make_pair(a.exp().sin(), b.exp().cos());
  };
  auto [ya, yb] = checkpoint(fn, a, b);
  const auto ga = torch::autograd::grad({ya.sum()}, {a})[0];
  const auto gb = torch::autograd::grad({yb.sum()}, {b})[0];
  EXPECT_EQ(runs, 3);
  auto [pa, pb] = fn(a, b);
  EXPECT_TRUE(ga.equal(torch::autograd::grad({pa.sum()}, {a})[0]));
  EXPECT_TRUE(gb.equal(torch::autograd::grad({pb.sum()}, {b})[0]));
}

TEST(Checkpoint, BackwardTwiceHasTheSameGradients) {
  auto net = mlp();
  auto x = torch::rand({4, 8}, torch::requires_grad());
  const auto loss = [&](bool checkpointed) {
    return (checkpointed ? checkpoint([&](at::Tensor x) { return net->forward(x); }, x) : net->forward(x)).exp().sum();
  };
  const auto run = [&](bool checkpointed) {
    return grads_of({x, net->parameters()[0]}, [&] {
      auto l = loss(checkpointed);
      l.backward({}, /*retain_graph=*/true);
      l.backward();
    });
  };
  expect_same_bits(run(false), run(true));
  auto l = loss(true);
  l.backward();
  EXPECT_CONTAINS(error_message([&] { l.backward(); }), "second time");
}

TEST(Checkpoint, DoubleBackwardHasTheSameGradients) {
  auto x = torch::rand({4}, torch::dtype(torch::kDouble).requires_grad(true));
  const auto second = [&](const at::Tensor& y) {
    auto g = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({g.sum()}, {x})[0];
  };
  const auto fn = [](const at::Tensor& x) { return x.exp().sin() * x; };
  EXPECT_TRUE(second(fn(x)).equal(second(checkpoint(fn, x))));
}

// The inner functions run in forward, in the recomputation of the outer checkpoint, and in their own recomputation.
TEST(Checkpoint, NestedCheckpointsHaveTheSameGradients) {
  auto x = torch::rand({4}, torch::requires_grad());
  int inner_runs = 0, outer_runs = 0;
  const auto inner = [&](const at::Tensor& x) {
    inner_runs++;
    return x.exp().sin();
  };
  const auto outer = [&](const at::Tensor& x) {
    outer_runs++;
    return checkpoint(inner, checkpoint(inner, x.cos()) * x).tanh();
  };
  const auto plain = grads_of({x}, [&] { inner(inner(x.cos()) * x).tanh().sum().backward(); });
  inner_runs = 0;
  const auto got = grads_of({x}, [&] { checkpoint(outer, x).sum().backward(); });
  expect_same_bits(plain, got);
  EXPECT_EQ(outer_runs, 2);
  EXPECT_EQ(inner_runs, 2 + 2 + 2);  // forward, outer recomputation, own recomputation
  const auto deep =
      grads_of({x}, [&] { checkpoint([&](at::Tensor x) { return checkpoint(outer, x); }, x).sum().backward(); });
  expect_same_bits(plain, deep);
}

// The function calls backward. Recomputation then happens before forward has ended.
TEST(Checkpoint, TheFunctionMayCallBackward) {
  for (const bool early_stop : {true, false})
    for (const bool retain : {true, false}) {
      auto x = torch::rand({4}, torch::requires_grad());
      const auto fn = [&](const at::Tensor& x) {
        auto y = x.sin();
        auto z = y.cos();
        auto g = torch::autograd::grad({z.sum()}, {x}, {}, retain)[0];
        return retain ? z * g : x.cos() * g;
      };
      const auto run = [&](bool checkpointed) {
        return grads_of(
            {x}, [&] { (checkpointed ? checkpoint({.early_stop = early_stop}, fn, x) : fn(x)).sum().backward(); });
      };
      expect_same_bits(run(false), run(true));
    }
}

TEST(Checkpoint, RecomputationUsesTheAutocastStateOfForward) {
  auto net = mlp();
  auto x = torch::rand({4, 8});
  std::vector<at::ScalarType> dtypes;
  const auto fn = [&](const at::Tensor& x) {
    auto y = net->forward(x);
    dtypes.push_back(y.scalar_type());
    return y.exp();
  };
  const auto run = [&](bool checkpointed) {
    return grads_of(net->parameters(), [&] {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::increment_nesting();
      auto y = checkpointed ? checkpoint(fn, x) : fn(x);
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      y.sum().backward();
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    });
  };
  expect_same_bits(run(false), run(true));
  EXPECT_EQ(dtypes, std::vector<at::ScalarType>(3, at::kBFloat16));
}

TEST(Checkpoint, AnExceptionInForwardRestoresState) {
  auto x = torch::rand({4}, torch::requires_grad());
  EXPECT_THROW(checkpoint(
                   [](const at::Tensor& x) -> at::Tensor {
                     checkpoint([](const at::Tensor& x) { return x.exp(); }, x);
                     throw std::runtime_error("in forward");
                   },
                   x),
               std::runtime_error);
  EXPECT_TRUE(detail::packers().empty());
}

TEST(Checkpoint, AnExceptionInRecomputationRestoresState) {
  auto x = torch::rand({4}, torch::requires_grad());
  int runs = 0;
  auto y = checkpoint(
      [&](const at::Tensor& x) {
        auto y = x.exp();
        torch::rand({1});
        manual_seed(99);
        at::autocast::set_autocast_enabled(at::kCPU, false);
        if (++runs == 2) throw std::runtime_error("in recomputation");
        return y.sin();
      },
      x);
  torch::manual_seed(5), manual_seed(7);
  random::state().offset = 3;
  const auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto loss = y.sum();
  EXPECT_THROW(loss.backward({}, true), std::runtime_error);
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_TRUE(state.equal(at::globalContext().defaultGenerator(at::kCPU).get_state()));
  EXPECT_EQ(random::state().seed, 7u);
  EXPECT_EQ(random::state().offset, 3u);
  EXPECT_TRUE(detail::packers().empty());
  EXPECT_FALSE(recomputing());
  loss.backward();  // the third run does not throw
  EXPECT_TRUE(x.grad().allclose((x.exp().cos() * x.exp()).detach()));
}

// A packer that accepts some tensors has priority over the checkpoint. Recomputation calls it too, although its scope
// has ended.
TEST(Checkpoint, PackersForSomeTensorsAreCalledInRecomputationToo) {
  auto x = torch::rand({3, 5}, torch::requires_grad()), w = torch::rand({5, 3}, torch::requires_grad());
  const auto fn = [&](const at::Tensor& x) { return torch::mm(x, w).exp(); };
  const auto expected = grads_of({x, w}, [&] { fn(x).sum().backward(); });
  int packed = 0, unpacked = 0;
  const Packer packs_w = {Accepts::SomeTensors, [&](const at::Tensor& t) -> Unpack {
                            if (t.data_ptr() != w.data_ptr()) return {};
                            packed++;
                            return [&] { return unpacked++, w.detach(); };
                          }};
  for (const bool inside : {false, true}) {
    packed = unpacked = 0;
    const auto got = grads_of({x, w}, [&] {
      at::Tensor y;
      if (inside) {
        y = checkpoint(
            [&](const at::Tensor& x) {
              SavedTensorHooks scope(packs_w);
              return fn(x);
            },
            x);
      } else {
        SavedTensorHooks scope(packs_w);
        y = checkpoint(fn, x);
      }
      y.sum().backward();
    });
    expect_same_bits(expected, got);
    EXPECT_EQ(packed, 2);    // forward, recomputation
    EXPECT_EQ(unpacked, 1);  // by the first graph; backward does not run the recomputed graph
  }
}

// ---- differences between forward and recomputation ----

// Runs `first` in forward and `then` in recomputation. Returns the error message of backward.
template <class First, class Then>
std::string error_of(First first, Then then, CheckpointOptions options = {}) {
  int runs = 0;
  auto x = torch::rand({4, 4}, torch::requires_grad());
  ModuleNameScope running("net.block");
  auto y = checkpoint(
      options, [&](at::Tensor x) { return runs++ == 0 ? first(x) : then(x); }, x);
  auto message = error_message<UsageError>([&] { y.sum().backward(); });
  EXPECT_TRUE(detail::packers().empty());
  return message;
}

TEST(CheckpointDifference, TheErrorNamesAnOtherShape) {
  const auto said = error_of([](at::Tensor x) { return x.exp().sum(); },
                             [](at::Tensor x) {
                               return torch::cat({x, x}).exp().sum();
                             });
  EXPECT_CONTAINS(said, "aten::cat in module net.block");
  const auto shape = error_of([](at::Tensor x) { return x.narrow(0, 0, 4).exp().sum(); },
                              [](at::Tensor x) { return x.narrow(0, 0, 2).exp().sum(); });
  EXPECT_CONTAINS(shape, "tensor 0 of the 1");
  EXPECT_CONTAINS(shape, "Float[4, 4] on cpu, saved by aten::exp in module net.block in forward");
  EXPECT_CONTAINS(shape, "Float[2, 4] on cpu, saved by aten::exp in module net.block in recomputation");
}

TEST(CheckpointDifference, TheErrorNamesAnExtraOp) {
  // Also for an op that saves no tensor. PyTorch would compute wrong gradients here.
  const auto adds =
      error_of([](at::Tensor x) { return x.sin().exp(); }, [](at::Tensor x) { return (x.sin() + 1).exp(); });
  EXPECT_CONTAINS(adds, "differentiable op 1 was aten::exp in module net.block in forward and is aten::add");
  const auto saves =
      error_of([](at::Tensor x) { return x.sin().exp(); }, [](at::Tensor x) { return x.sin().tanh().exp(); });
  EXPECT_CONTAINS(saves, "saved by aten::exp");
  EXPECT_CONTAINS(saves, "saved by aten::tanh");
}

TEST(CheckpointDifference, TheErrorNamesAMissingOp) {
  const auto said = error_of([](at::Tensor x) { return x.sin().exp(); }, [](at::Tensor x) { return x.sin(); });
  EXPECT_CONTAINS(said, "forward saved 2 tensors for backward, recomputation only 1");
  EXPECT_CONTAINS(said, "saved by aten::exp in module net.block");
}

TEST(CheckpointDifference, TheErrorNamesAnOpAfterTheEndOfForward) {
  const auto said = error_of([](at::Tensor x) { return x.sin().exp(); },
                             [](at::Tensor x) { return x.sin().exp().tanh(); }, {.early_stop = false});
  EXPECT_CONTAINS(said,
                  "forward saved 2 tensors for backward, recomputation also saves Float[4, 4] on cpu by aten::tanh");
}

TEST(CheckpointDifference, WithoutDeterminismCheckNothingIsThrown) {
  EXPECT_EQ(error_of([](at::Tensor x) { return x.sin().exp(); }, [](at::Tensor x) { return x.sin().tanh(); },
                     {.determinism_check = false}),
            "nothing was thrown");
}

// For example, forward builds a table on first use.
TEST(CheckpointDifference, OpsWithoutGradientMayDiffer) {
  const auto with_table = [](at::Tensor x) { return (x * torch::arange(4).cos()).exp(); };
  const auto table = torch::arange(4).cos();
  EXPECT_EQ(error_of(with_table, [&](at::Tensor x) { return (x * table).exp(); }), "nothing was thrown");
}

TEST(CheckpointDifference, AnInPlaceWriteToASavedTensorIsDetected) {
  auto x = torch::rand({4}, torch::requires_grad());
  auto y = checkpoint(
      {.early_stop = false},
      [](const at::Tensor& x) {
        auto y = x.exp();
        y.add_(1);
        return y;
      },
      x);
  EXPECT_CONTAINS(error_message([&] { y.sum().backward(); }), "modified in place");
  auto z = x * 1;
  auto out = checkpoint([](const at::Tensor& z) { return z.exp().sin(); }, z);
  z.mul_(2);
  EXPECT_CONTAINS(error_message([&] { out.sum().backward(); }), "modified by an inplace operation");
}

// ---- memory ----

// L segments of [tanh, tanh, tanh, tanh] on n floats; tanh saves its output. Without checkpoints all outputs are saved:
// 4 L n. With checkpoints only the output of each segment, which is the input of the next one, is saved: L n.
TEST(CheckpointMemory, PeakIsLowerByTheExpectedAmount) {
  constexpr int64_t kSegments = 6, n = 1 << 16, kBytes = n * 4;
  const auto segment = [](const at::Tensor& x) { return x.tanh().tanh().tanh().tanh(); };
  struct Bytes {
    int64_t after_forward, peak;
  };
  const auto run = [&](bool checkpointed) {
    auto x = torch::rand({n}, torch::requires_grad());
    const auto ones = torch::ones({n});
    testing::CountingAllocator count;
    auto y = x;
    for (int64_t i = 0; i < kSegments; i++) y = checkpointed ? checkpoint(segment, y) : segment(y);
    const int64_t after_forward = count.live_bytes();
    y.backward(ones);
    x.mutable_grad().reset();
    y.reset();
    EXPECT_EQ(count.live_bytes(), 0);
    return Bytes{after_forward, count.peak_bytes()};
  };
  const auto plain = run(false), checkpointed = run(true);
  EXPECT_EQ(plain.after_forward, 4 * kSegments * kBytes);
  EXPECT_EQ(checkpointed.after_forward, kSegments * kBytes);
  EXPECT_EQ(plain.peak - plain.after_forward, 2 * kBytes);  // the incoming and the outgoing gradient
  // Backward of a segment: its four outputs and one gradient; then three outputs and two gradients.
  EXPECT_EQ(checkpointed.peak - checkpointed.after_forward, (4 + 1) * kBytes);
}

TEST(CheckpointMemory, GeneratorStateIsSavedOnlyIfTheFunctionUsesTheGenerator) {
  const auto state_bytes = static_cast<int64_t>(at::globalContext().defaultGenerator(at::kCPU).get_state().nbytes());
  auto x = torch::rand({256}, torch::requires_grad());
  testing::CountingAllocator count;
  auto y = checkpoint([](const at::Tensor& x) { return x.tanh(); }, x);
  EXPECT_EQ(count.live_bytes(), 1024);
  auto z = checkpoint([](const at::Tensor& x) { return x * torch::rand({1}); }, x);
  EXPECT_EQ(count.live_bytes(), 2 * 1024 + state_bytes);
}

// The outer checkpoint recomputes the input of the inner one, so it is not saved.
TEST(CheckpointMemory, NestedCheckpointsSaveOnlyTheOutermostInput) {
  constexpr int64_t n = 1 << 16, kBytes = n * 4;
  auto x = torch::rand({n}, torch::requires_grad());
  testing::CountingAllocator count;
  const auto inner = [](const at::Tensor& x) { return x.tanh().tanh(); };
  auto y = checkpoint([&](const at::Tensor& x) { return checkpoint(inner, checkpoint(inner, x.tanh())).tanh(); }, x);
  EXPECT_EQ(count.live_bytes(), kBytes);  // only y
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

// ---- distributed tensors ----

// Two layers, colwise and rowwise, with dropout between them: three collectives and a random counter.
at::Tensor distributed_net(const at::Tensor& x, const at::Tensor& up, const at::Tensor& down) {
  auto hidden = torch::dropout(torch::gelu(torch::mm(x, up)), 0.4, true);
  return torch::mm(hidden, down);
}

TEST(CheckpointDistributed, GradientsAreBitwiseEqual) {
  for (const int64_t ranks : {1, 2, 4}) {
    run_ranks(ranks, [&](Rank& me) {
      const auto mesh = me.mesh("tp=" + std::to_string(ranks));
      manual_seed(11);
      const auto options = torch::dtype(torch::kFloat);
      const at::Tensor x = distribute_tensor(random::rand({6, 8}, options), mesh, {Replicate()});
      const at::Tensor up = distribute_tensor(random::rand({8, 16}, options), mesh, {Shard(1)});
      const at::Tensor down = distribute_tensor(random::rand({16, 8}, options), mesh, {Shard(0)});
      for (const auto& t : {x, up, down}) t.requires_grad_();
      const auto run = [&](auto&& net) {
        return grads_of({x, up, down}, [&] {
          manual_seed(12);
          auto y = net(net(x));
          const auto offset = random::state().offset;
          y.square().sum().backward();
          EXPECT_EQ(random::state().offset, offset);
        });
      };
      const auto net = [&](const at::Tensor& x) { return distributed_net(x, up, down); };
      const auto plain = run(net);
      for (int i = 0; i < 3; i++) {  // repeated, on all ranks at the same time
        const auto got = run([&](const at::Tensor& x) { return checkpoint(net, x); });
        for (size_t p = 0; p < plain.size(); p++) {
          EXPECT_EQ(DTensor(got[p]).placements(), DTensor(plain[p]).placements());
          EXPECT_TRUE(got[p].equal(plain[p])) << p;
        }
      }
      EXPECT_TRUE(detail::packers().empty());
    });
  }
}

TEST(CheckpointDistributed, TheErrorNamesOtherPlacements) {
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const at::Tensor x = distribute_tensor(torch::ones({4, 4}), mesh, {Replicate()}).requires_grad_();
    int runs = 0;
    auto y = checkpoint(
        [&](const at::Tensor& x) { return DTensor(x).redistribute({runs++ == 0 ? Shard(0) : Shard(1)}).exp(); }, x);
    const auto said = error_message<UsageError>([&] { y.sum().backward(); });
    EXPECT_CONTAINS(said, "f32[4, 4][S(0)] on mesh(tp=2), saved by aten::exp in forward");
    EXPECT_CONTAINS(said, "f32[4, 4][S(1)] on mesh(tp=2), saved by aten::exp in recomputation");
  });
}

}  // namespace
}  // namespace tessera
