// Tensors that share memory: a write through one is seen through the other, by values and by autograd. In particular
// writes in backward through views that communicate, for every placement of value and gradient.
#include "compare_with_plain.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/policy.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::test {
namespace {

std::vector<std::pair<Placement, bool>> with_both(const std::vector<Placement>& placements) {
  std::vector<std::pair<Placement, bool>> all;
  for (const auto& p : placements)
    for (bool flag : {false, true}) all.emplace_back(p, flag);
  return all;
}

// f on a DTensor beside f on a plain tensor, for every placement of the value and of the result's gradient.
template <class F>
void expect_gradients_like_plain(const at::Tensor& value, F f) {
  auto plain = value.clone().set_requires_grad(true);
  const auto expected = f(plain);
  const auto weights = at::linspace(1, 2, expected.numel(), expected.options()).view(expected.sizes()).detach();
  (expected * weights).sum().backward();
  auto placements_of = [](int64_t ndim) {
    std::vector<Placement> all = {Replicate()};
    for (int64_t d = 0; d < ndim; d++) all.push_back(Shard(d));
    return all;
  };
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("x=2");
    // redistribute() gives the gradient the placement of the value; a product does not.
    for (const auto& p : placements_of(value.dim()))
      for (const auto& [q, redistributes] : with_both(placements_of(expected.dim()))) {
        SCOPED_TRACE(c10::str("value ", p, ", gradient ", q, redistributes ? " of redistribute" : " of a product"));
        at::Tensor x = distribute_tensor(value, mesh, {p}).set_requires_grad(true);
        at::Tensor y;
        try {
          y = f(x);
        } catch (const ShardingError&) {
          continue;  // a view in forward
        }
        expect_value(y, expected);
        if (redistributes) y = DTensor(y).redistribute({q});
        try {
          (y * distribute_tensor(weights, mesh, {q})).sum().backward();
        } catch (const ShardingError&) {
          continue;  // a formula of autograd writes to a partial gradient
        }
        expect_value(x.grad(), plain.grad());
      }
  });
}

// Writes to views of a new tensor with the values of the gradient.
at::Tensor with_first_row_zero(const at::Tensor& gradient) {
  auto g = gradient.sin();
  g.slice(0, 0, 1).zero_();
  g.select(1, 1).mul_(3);
  g.view({-1}).slice(0, 2, 7, 2).add_(1);
  g.diagonal().copy_(g.diagonal(1).slice(0, 0, g.diagonal().size(0)));
  const auto late = g.slice(1, 0, 2);  // a write to g after the view was made is seen through the view
  g.mul_(2);
  return g + late.sum();
}

TEST(BackwardWrites, InAHook) {
  expect_gradients_like_plain(at::linspace(-1, 1, 20, at::kDouble).view({4, 5}), [](const at::Tensor& x) {
    auto y = x * 2;
    y.register_hook(with_first_row_zero);
    return y.cos();
  });
}

// A hook on a leaf runs in the node that makes .grad, which detaches the gradient too.
at::Tensor with_first_row_zero_by_detach(const at::Tensor& gradient) {
  const auto g = gradient.sin();
  g.slice(0, 0, 1).detach().zero_();
  g.select(1, 1).detach().detach().mul_(3);
  const auto flat = g.view({-1}).detach();
  flat.slice(0, 2, 7, 2).detach().add_(1);
  return g * 2;
}

TEST(BackwardWrites, ToADetachedViewInAHookOnALeaf) {
  expect_gradients_like_plain(at::linspace(-1, 1, 20, at::kDouble).view({4, 5}), [](const at::Tensor& x) {
    x.register_hook(with_first_row_zero_by_detach);
    return x.cos();
  });
}

struct AfterAccumulation : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable& leaf) override {
    const at::Tensor gradient = leaf.grad();
    leaf.mutable_grad().reset();  // as an optimizer that runs in backward does
    leaf.mutable_grad() = with_first_row_zero_by_detach(gradient);
  }
};
TEST(BackwardWrites, ToADetachedViewInAHookAfterAccumulation) {
  expect_gradients_like_plain(at::linspace(-1, 1, 20, at::kDouble).view({4, 5}), [](const at::Tensor& x) {
    torch::autograd::impl::set_post_acc_grad_hooks(x, std::make_unique<AfterAccumulation>());
    return x.cos();
  });
}

// unbind gives a row, a slice of which communicates: the sequence 100,098 of dtensor.aliasing_soak.
TEST(BackwardWrites, ToADetachedSliceOfARowInAHookOnALeaf) {
  expect_gradients_like_plain(at::linspace(-1, 1, 20, at::kDouble).view({5, 4}), [](const at::Tensor& x) {
    x.register_hook([](const at::Tensor& gradient) {
      const auto g = gradient * 0.5;
      g.unbind(0).at(1).squeeze().slice(0, 0, 2).detach().sigmoid_();
      return g;
    });
    return x.cos();
  });
}

// The gradient of a sum is expanded: its strides are 0. A redistribution keeps them, because the memory order of a
// product depends on them: the sequence 303,804 of dtensor.aliasing_soak.
TEST(BackwardWrites, AnExpandedGradientHasTheMemoryOrderOfThePlainOne) {
  expect_gradients_like_plain(at::linspace(-1, 1, 24, at::kDouble).view({2, 3, 4}), [](const at::Tensor& x) {
    auto y = x.diagonal();  // (4, 2), the first dim is the inner one
    y.register_hook([](const at::Tensor& gradient) {
      auto g = gradient * 0.5;
      EXPECT_EQ(g.strides(), (at::IntArrayRef{1, 4}));
      g.transpose(0, 1).view({-1}).slice(0, 1, 4).mul_(3);
      return g;
    });
    return x * 2 + y.cos().sum();
  });
}

// A tensor of which several elements are one memory location, redistributed as an operand.
TEST(SharedMemory, ProductsOfExpandedTensorsHaveTheStridesOfPlainOnes) {
  const auto run = [](const auto& place, const auto& other) {
    const auto turned = other(at::arange(24.).view({4, 3, 2})).permute({2, 1, 0});
    const auto flat = other(at::arange(8.).view({4, 2})).t();
    return std::vector<at::Tensor>{
        place(at::arange(2.).view({2, 1, 1})).expand({2, 3, 4}) * turned,
        place(at::arange(4.)).expand({2, 3, 4}) * turned,
        place(at::arange(5.)).unfold(0, 4, 1) * flat,  // strides 1, 1
        place(at::arange(5.)).unfold(0, 4, 1) + 1,
        place(at::arange(1.)).expand({2, 4}).add(flat),
    };
  };
  const auto same = [](const at::Tensor& t) { return t; };
  const auto expected = run(same, same);
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("x=2");
    const auto replicated = [&](const at::Tensor& t) -> at::Tensor { return distribute_tensor(t, mesh); };
    for (int64_t d = 0; d < 2; d++) {
      const auto sharded = [&](const at::Tensor& t) -> at::Tensor { return distribute_tensor(t, mesh, {Shard(d)}); };
      const auto found = run(replicated, sharded);
      for (size_t i = 0; i < expected.size(); i++) {
        SCOPED_TRACE(c10::str("result ", i, ", dim ", d));
        expect_value(found[i], expected[i]);
        EXPECT_EQ(found[i].strides(), expected[i].strides());
        const auto local = DTensor(found[i]).to_local();
        const auto strides = strides_in_order_of(local.sizes(), found[i].strides());
        for (int64_t dim = 0; dim < local.dim(); dim++)
          EXPECT_TRUE(local.size(dim) <= 1 || local.stride(dim) == strides[dim]) << dim << ": " << local.strides();
      }
    }
  });
}

// The gradient is a view that communicated. As .grad it is a tensor of its own: writes to it do not communicate.
TEST(BackwardWrites, GradIsATensorOfItsOwn) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    for (const bool hooked : {false, true}) {
      at::Tensor x = distribute_tensor(at::arange(8.), mesh).set_requires_grad(true);
      if (hooked && me.rank == 0) x.register_hook([](const at::Tensor& g) { EXPECT_EQ(g.detach().numel(), 8); });
      const auto weights = distribute_tensor(at::arange(8.).view({2, 4}), mesh, {Shard(1)});
      (x.view({2, 4}) * weights).sum().backward();
      expect_value(x.grad(), at::arange(8.));
      const CommPolicyScope no_communication(CommPolicy::Error);
      x.grad().mul_(2);
      expect_value(x.grad(), at::arange(8.) * 2);
    }
  });
}

struct WritesInBackward : torch::autograd::Function<WritesInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               const torch::autograd::tensor_list& gradients) {
    return {with_first_row_zero(gradients[0])};
  }
};
TEST(BackwardWrites, InACustomFunction) {
  expect_gradients_like_plain(at::linspace(-1, 1, 20, at::kDouble).view({4, 5}),
                              [](const at::Tensor& x) { return WritesInBackward::apply(x).cos(); });
}

// The backward of a write through a view writes to a view of the gradient.
TEST(BackwardWrites, OfAWriteThroughAView) {
  const auto value = at::linspace(-1, 1, 20, at::kDouble).view({4, 5});
  expect_gradients_like_plain(value, [](const at::Tensor& x) {
    auto y = x * 2;
    y.slice(0, 1, 3).mul_(3);
    return y;
  });
  expect_gradients_like_plain(value, [](const at::Tensor& x) {
    auto y = x * 2;
    y.select(1, 2).zero_();
    y.diagonal().sigmoid_();
    return y;
  });
  expect_gradients_like_plain(value, [](const at::Tensor& x) {
    auto y = x * 2;
    y.view({-1}).slice(0, 3, 11, 2).mul_(x.sum());
    return y;
  });
}

at::Tensor like(const at::Tensor& x, const at::Tensor& t) {
  return is_dtensor(x) ? at::Tensor(distribute_tensor(t, DTensor(x).device_mesh())) : t;
}

// Ops whose autograd formulas write to views.
TEST(BackwardWrites, InFormulasOfAutograd) {
  const auto value = at::linspace(-1, 1, 16, at::kDouble).view({4, 4}) + at::eye(4, at::kDouble) * 3;
  const auto symmetric = value + value.t();
  expect_gradients_like_plain(value, [](const at::Tensor& x) {
    return at::index_put(x * 2, {like(x, at::tensor({0, 2}))}, x.sum() * like(x, at::ones({2, 4}, at::kDouble)));
  });
  expect_gradients_like_plain(value, [](const at::Tensor& x) {
    auto y = x * 2;
    y.index_put_({like(x, at::tensor({1, 3}))}, x.sum() * like(x, at::ones({2, 4}, at::kDouble)), true);
    return y;
  });
  expect_gradients_like_plain(value, [](const at::Tensor& x) {
    return at::as_strided_scatter(x * 2, x.sum() * like(x, at::ones({2, 2}, at::kDouble)), {2, 2}, {1, 2}, 1);
  });
  expect_gradients_like_plain(value, [](const at::Tensor& x) {
    return at::linalg_householder_product(x * 0.3, like(x, at::full({4}, 0.5, at::kDouble)));
  });
  expect_gradients_like_plain(symmetric, [](const at::Tensor& x) {
    const auto [values, vectors] = at::linalg_eigh(x);
    return values.unsqueeze(0) + vectors.abs();
  });
  expect_gradients_like_plain(
      value, [](const at::Tensor& x) { return at::select_scatter(x * 2, x.select(0, 0).clone() * 3, 0, 1); });
  expect_gradients_like_plain(
      value, [](const at::Tensor& x) { return at::slice_scatter(x * 2, x.slice(0, 0, 2).clone() * 3, 0, 1, 3); });
  expect_gradients_like_plain(value, [](const at::Tensor& x) { return at::linalg_solve(x, x.t()); });
  expect_gradients_like_plain(value, [](const at::Tensor& x) { return at::linalg_inv(x); });
  expect_gradients_like_plain(value, [](const at::Tensor& x) { return std::get<1>(at::linalg_svd(x)); });
  expect_gradients_like_plain(value, [](const at::Tensor& x) { return at::cumprod(x, 0); });
  expect_gradients_like_plain(value, [](const at::Tensor& x) { return x.prod(0); });
}

// ---- version counters ----

void expect_modified(const at::Tensor& loss) {
  EXPECT_ERROR(c10::Error, loss.backward(), "modified by an inplace operation");
}

TEST(SharedMemory, AWriteThroughAnAliasIsSeenByAutograd) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    const auto x = distribute_tensor(at::arange(6.), mesh, {Shard(0)}).set_requires_grad(true);
    const at::NoGradGuard no_grad;
    auto saved = [&] {  // y, saved for the backward of y * y
      const at::AutoGradMode grad(true);
      const auto y = x * 1;
      return std::pair(y, (y * y).sum());
    };
    {
      const auto [y, loss] = saved();
      DTensor(y).to_local().add_(1);
      expect_modified(loss);
    }
    {
      const auto [y, loss] = saved();
      DTensor(y).redistribute({Shard(0)}).add_(1);
      expect_modified(loss);
    }
    {
      const auto [y, loss] = saved();
      DTensor(y).redistribute({Shard(0)}).view({2, 3}).add_(1);
      expect_modified(loss);
    }
    {
      const auto [y, loss] = saved();
      DTensor(y.view({2, 3})).to_local().add_(1);
      expect_modified(loss);
    }
    {
      const at::Tensor local = at::ones({3}), d = DTensor::from_local(local, mesh, {Shard(0)});
      const at::AutoGradMode grad(true);
      const auto loss = (d * x).sum();
      local.add_(1);
      expect_modified(loss);
    }
    {
      const auto local = at::ones({3}).set_requires_grad(true);
      const at::AutoGradMode grad(true);
      const at::Tensor twice = local * 1, square = twice * twice, d = DTensor::from_local(twice, mesh, {Shard(0)});
      d.mul_(2);
      expect_modified(square.sum());
    }
  });
}

// A parameter that became distributed by set_data.
TEST(SharedMemory, LocalTensorsOfParameters) {
  run_ranks(2, [](Rank& me) {
    auto p = at::arange(6.).set_requires_grad(true);
    distribute_in_place(p, me.mesh("x=2"), {Shard(0)});
    const auto loss = (p * p).sum();
    const at::NoGradGuard no_grad;
    DTensor(p).to_local().add_(1);
    expect_modified(loss);
  });
}

// In grad mode a write through the alias has a gradient.
TEST(SharedMemory, AWriteThroughAnAliasHasAGradient) {
  for (const auto& p : {Shard(0), Replicate()})
    run_ranks(2, [&](Rank& me) {
      SCOPED_TRACE(c10::str(p));
      const auto mesh = me.mesh("x=2");
      const auto value = at::arange(6.) + 1;
      for (const auto& write : std::vector<std::function<void(const at::Tensor&)>>{
               [](const at::Tensor& y) { DTensor(y).to_local().mul_(3); },
               [](const at::Tensor& y) {
                 DTensor(y).to_local().slice(0, 0, 2).view({2, 1}).mul_(3).slice(0, 0, 0);
               },
               [](const at::Tensor& y) { DTensor(y).redistribute(DTensor(y).placements()).mul_(3); },
               [&](const at::Tensor& y) {
                 DTensor::from_local(DTensor(y).to_local(), mesh, DTensor(y).placements()).mul_(3);
               }}) {
        at::Tensor x = distribute_tensor(value, mesh, {p}).set_requires_grad(true);
        const auto y = x * 1;
        write(y);
        const auto expected = DTensor(y.detach()).full_tensor() / value * 2;  // of 2 * y
        // The gradient arrives with each placement.
        for (const auto& q : {Shard(0), Replicate()}) {
          x.mutable_grad().reset();
          (DTensor(y).redistribute({q}) * 2).sum().backward({}, true);
          expect_value(x.grad(), expected);
        }
      }
    });
}

// The result of a redistribution that is still in flight has its memory already.
TEST(SharedMemory, AnAliasOfAPendingResultHasAGradient) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    const auto value = at::arange(6.) + 1;
    for (const bool through_alias : {false, true}) {
      at::Tensor x = distribute_tensor(value, mesh, {Shard(0)}).set_requires_grad(true);
      const at::Tensor gathered = DTensor(x * 1).redistribute({Replicate()});
      const at::Tensor alias = DTensor(gathered).redistribute({Replicate()});
      (through_alias ? alias : gathered).mul_(3);
      const at::Tensor other = through_alias ? gathered : alias;
      expect_value(other, value * 3);
      (other * other).sum().backward();
      expect_value(x.grad(), value * 18);
    }
  });
}

TEST(SharedMemory, AViewOfALeafIsRefused) {
  run_ranks(2, [](Rank& me) {
    const auto x = distribute_tensor(at::arange(6.), me.mesh("x=2"), {Shard(0)}).set_requires_grad(true);
    EXPECT_ERROR(c10::Error, DTensor(x).to_local().mul_(2), "a view of a leaf Variable that requires grad");
    EXPECT_ERROR(c10::Error, DTensor(x).redistribute({Shard(0)}).mul_(2), "a view of a leaf Variable");
  });
}

// A rank that writes to the local tensor of a view must not use other cached values than its peers.
TEST(SharedMemory, OneRankWritesToTheLocalTensorOfAView) {
  run_ranks(2, [](Rank& me) {
    const at::Tensor sum = distribute_tensor(at::ones({4, 6}), me.mesh("x=2"), {Shard(0)}).sum(0);
    expect_value(sum.relu(), at::full({6}, 4.));
    auto local = DTensor(sum.view({2, 3})).to_local();
    if (me.rank == 0) local.add_(1);
    expect_value(sum.relu(), at::full({6}, 5.));
  });
}

// Without grad mode an alias does not keep the graph alive.
TEST(SharedMemory, AnAliasWithoutGradKeepsNoGraph) {
  run_ranks(2, [](Rank& me) {
    const auto x = distribute_tensor(at::arange(6.), me.mesh("x=2")).set_requires_grad(true);
    const at::Tensor y = x * 1;
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(DTensor(y).full_tensor().is_view());
    EXPECT_FALSE(DTensor(y).to_local().is_view());
  });
}

// A redistribution has memory of its own, as clone() has: views that need dense memory work on it.
TEST(Aliasing, RedistributionOfAViewIsDense) {
  testing::run_ranks(3, [](testing::Rank& me) {
    const auto mesh = me.mesh("x=3");
    const auto x = torch::arange(20.0).reshape({4, 5});
    for (const auto& from : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())})
      for (const auto& to : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
        const auto part = distribute_tensor(x, mesh, {from}).slice(1, 0, 5, 2);
        if (DTensor(part).placements()[0] == to) continue;  // shares the memory
        const auto dense = DTensor(part).redistribute({to});
        EXPECT_EQ(dense.strides(), x.slice(1, 0, 5, 2).clone().strides()) << from << " to " << to;
        EXPECT_TRUE(at::equal(DTensor(dense.view({12})).full_tensor(), x.slice(1, 0, 5, 2).reshape({12})))
            << from << " to " << to;
      }
  });
}

}  // namespace
}  // namespace tessera::test
