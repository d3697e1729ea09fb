// Ops by their route: argument errors of the dense op, out= forms, gathered ops, ops of the batch family, complex
// numbers, views that return a list.
#include "compare_with_plain.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/policy.h"
#include "tessera/dtensor/random.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/headeronly/version.h>
#include <functional>
#include <limits>

namespace tessera::test {
namespace {

using TensorFn = std::function<at::Tensor(const at::Tensor&)>;

std::vector<Placement> single_placements(const at::Tensor& value) {
  std::vector<Placement> all = {Replicate()};
  for (int64_t d = 0; d < value.dim(); d++) all.push_back(Shard(d));
  return all;
}

// Values and gradients, on 1 to 4 ranks, with every placement, over uneven and empty shards.
void expect_value_and_gradient(const at::Tensor& value, const TensorFn& f) {
  expect_like_plain(value, single_placements(value), 4, expect_value, f);
}

// Values alone, on 2 and 4 ranks.
void expect_same_value(const at::Tensor& value, const TensorFn& f) {
  const auto expected = f(value);
  for (int n : {2, 4})
    run_ranks(n, [&](Rank&) {
      const auto mesh = init_device_mesh("cpu", {n}, {"x"});
      for (const auto& p : single_placements(value)) {
        SCOPED_TRACE(c10::str(n, " ranks, ", to_string(p)));
        const auto found = f(distribute_tensor(value, mesh, {p}));
        ASSERT_EQ(found.sizes(), expected.sizes());
        EXPECT_TRUE(torch::allclose(DTensor(found).full_tensor(), expected, 1e-5, 1e-6, /*equal_nan=*/true));
      }
    });
}

std::string first_line(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::Error& e) {
    const std::string text = e.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  } catch (const std::exception& e) {
    return std::string("not a c10::Error: ") + e.what();
  }
  return "no error";
}

// ---- argument errors ----

TEST(EveryOp, ArgumentErrorsAreThoseOfTheDenseOp) {
  const struct {
    const char* name;
    TensorFn call;
  } wrong[] = {
      {"sum", [](const at::Tensor& x) { return x.sum(5); }},
      {"view",
       [](const at::Tensor& x) {
         return x.view({-1, -1});
       }},
      {"view sizes",
       [](const at::Tensor& x) {
         return x.view({7, 7});
       }},
      {"softmax", [](const at::Tensor& x) { return x.softmax(3); }},
      {"transpose", [](const at::Tensor& x) { return x.transpose(0, 9); }},
      {"mm", [](const at::Tensor& x) { return x.mm(x); }},
      {"add", [](const at::Tensor& x) { return x + x.t(); }},
      {"cat",
       [](const at::Tensor& x) {
         return at::cat({x, x.t()}, 0);
       }},
      {"topk", [](const at::Tensor& x) { return std::get<0>(x.topk(99, 0)); }},
      {"index_select", [](const at::Tensor& x) { return x.index_select(7, x.argmax(0)); }},
      {"unsqueeze", [](const at::Tensor& x) { return x.unsqueeze(9); }},
      {"repeat", [](const at::Tensor& x) { return x.repeat({2}); }},
      {"expand",
       [](const at::Tensor& x) {
         return x.expand({7, 7});
       }},
      {"flip", [](const at::Tensor& x) { return x.flip({5}); }},
      {"cumsum", [](const at::Tensor& x) { return x.cumsum(4); }},
      {"avg_pool2d",
       [](const at::Tensor& x) {
         return at::avg_pool2d(x.unsqueeze(0), {2, 2}, {1, 1}, {5, 5});
       }},
      {"max_pool2d",
       [](const at::Tensor& x) {
         return at::max_pool2d(x.unsqueeze(0), {2, 2}, {1, 1}, {5, 5});
       }},
      {"multinomial of zeros", [](const at::Tensor& x) { return at::multinomial(x * 0, 2); }},
      {"multinomial in 3-D", [](const at::Tensor& x) { return at::multinomial(x.abs().unsqueeze(0), 1); }},
  };
  const auto value = torch::randn({5, 3});
  for (const auto& [name, call] : wrong) {
    const auto& f = call;
    const auto dense = first_line([&] { f(value); });
    ASSERT_NE(dense, "no error") << name;
    for (const int64_t n : {2, 4})  // of four ranks one has an empty shard
      run_ranks(n, [&](Rank& me) {
        for (const auto& p : {Replicate(), Shard(0), Shard(1)}) {
          const at::Tensor x = distribute_tensor(value, me.mesh("x=" + std::to_string(n)), {p});
          EXPECT_EQ(first_line([&] { f(x); }), dense) << name << " " << to_string(p) << " of " << n << " ranks";
        }
      });
  }
}

// LibTorch makes a plain tensor of the number. No error is about it.
TEST(EveryOp, NumbersAreAssignedByIndex) {
  using torch::indexing::Slice;
  const auto value = torch::randn({5, 3});
  const auto assign = [](const at::Tensor& x) {
    auto y = x * 1;
    y.index_put_({y.gt(0)}, 1.5);
    y.index_put_({Slice(1, 3)}, 2.5);
    y.index_put_({Slice(), 1}, 3.5);
    y.index_put_({y.argmax(0)}, 4.5);
    return y;
  };
  for (const int64_t n : {2, 4})
    run_ranks(n, [&](Rank& me) {
      for (const auto& p : {Replicate(), Shard(0), Shard(1)})
        expect_value(assign(distribute_tensor(value, me.mesh("x=" + std::to_string(n)), {p})), assign(value));
    });
}

// ---- out= and in-place forms ----

TEST(EveryOp, OutFormsWriteTheTensorWithItsPlacements) {
  const auto a = torch::randn({5, 4}), b = torch::randn({5, 4}), m = torch::randn({4, 5});
  run_ranks(3, [&](Rank& me) {
    const auto mesh = me.mesh("x=3");
    for (const auto& in : {Replicate(), Shard(0), Shard(1)})
      for (const auto& to : {Replicate(), Shard(0), Shard(1)}) {
        SCOPED_TRACE(c10::str(to_string(in), " into ", to_string(to)));
        const at::Tensor x = distribute_tensor(a, mesh, {in}), y = distribute_tensor(b, mesh, {in}),
                         w = distribute_tensor(m, mesh, {in});
        at::Tensor out = distribute_tensor(torch::zeros({5, 4}), mesh, {to});
        expect_value(at::add_out(out, x, y), a + b);
        expect_value(at::exp_out(out, x), a.exp());
        expect_value(at::clamp_out(out, x, 0.1), a.clamp(0.1));
        expect_value(at::special_bessel_j0_out(out, x), at::special_bessel_j0(a));
        EXPECT_EQ(DTensor(out).placements()[0], to);
        at::Tensor product = distribute_tensor(torch::zeros({5, 5}), mesh, {to});
        expect_value(at::mm_out(product, x, w), a.mm(m));
        at::Tensor total = distribute_tensor(torch::zeros({4}), mesh, {Replicate()});
        expect_value(at::sum_out(total, x, 0), a.sum(0));
        at::Tensor values = distribute_tensor(torch::zeros({4}), mesh, {Replicate()}),
                   indices = distribute_tensor(torch::zeros({4}, torch::kLong), mesh, {Replicate()});
        at::max_out(values, indices, x, 0);
        expect_value(values, std::get<0>(a.max(0)));
        expect_value(indices, std::get<1>(a.max(0)));
        at::Tensor inplace = distribute_tensor(a.abs(), mesh, {to});
        inplace.pow_(y);
        expect_value(inplace, a.abs().pow(b));
        at::Tensor eye = distribute_tensor(torch::zeros({5, 4}), mesh, {to});
        expect_value(at::eye_out(eye, 5, 4), torch::eye(5, 4));
      }
    at::Tensor small = distribute_tensor(torch::zeros({2, 2}), mesh, {Shard(0)});
    const at::Tensor x = distribute_tensor(a, mesh, {Shard(0)});
    EXPECT_THROW(at::exp_out(small, x), UsageError);
    at::Tensor ints = distribute_tensor(torch::zeros({5, 4}, torch::kLong), mesh, {Shard(0)});
    EXPECT_THROW(at::exp_out(ints, x), c10::Error);
  });
}

// An op with out= arguments and others that it writes: each gets its own value.
TEST(EveryOp, OutFormsThatAlsoWriteOtherArguments) {
  const auto value = torch::randn({6, 3, 2});
  auto plain = std::vector<at::Tensor>{torch::zeros({3}), torch::ones({3}), torch::empty({6, 3, 2}), torch::empty({3}),
                                       torch::empty({3})};
  const auto run = [](const at::Tensor& x, std::vector<at::Tensor>& t) {
    at::_native_batch_norm_legit_out(t[2], t[3], t[4], x, {}, {}, t[0], t[1], /*training=*/true, 0.1, 1e-5);
  };
  run(value, plain);
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("x=2");
    for (const auto& p : {Replicate(), Shard(0), Shard(1)}) {
      std::vector<at::Tensor> found;
      for (const auto& t :
           {torch::zeros({3}), torch::ones({3}), torch::zeros({6, 3, 2}), torch::zeros({3}), torch::zeros({3})})
        found.push_back(distribute_tensor(t, mesh, {Replicate()}));
      run(distribute_tensor(value, mesh, {p}), found);
      for (size_t i = 0; i < found.size(); i++) expect_value(found[i], plain[i]);
    }
  });
}

// ---- gathered ops ----

TEST(EveryOp, GatheredOpsGiveReplicatedResults) {
  const auto value = torch::randn({5, 3});
  const auto rounded = value.mul(2).round();
  expect_same_value(value, [](const at::Tensor& x) { return x.gt(0).nonzero(); });
  expect_same_value(value, [](const at::Tensor& x) { return x.masked_select(x.gt(0)); });
  expect_same_value(value, [](const at::Tensor& x) { return x.index({x.gt(0)}); });
  expect_same_value(value, [](const at::Tensor& x) { return x.histc(4, -2, 2); });
  expect_same_value(rounded, [](const at::Tensor& x) { return std::get<0>(at::_unique2(x, true, true, true)); });
  expect_same_value(value, [](const at::Tensor& x) { return at::block_diag({x, x}); });
  expect_same_value(value, [](const at::Tensor& x) { return x.take(x.gt(9).to(torch::kLong)); });
  expect_same_value(value, [](const at::Tensor& x) { return at::pdist(x); });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return x.masked_select(x.gt(0)); });
}

TEST(EveryOp, ThePolicyForbidsAGather) {
  run_ranks(2, [](Rank& me) {
    const at::Tensor sharded = distribute_tensor(torch::randn({4, 3}), me.mesh("x=2"), {Shard(0)}),
                     replicated = distribute_tensor(torch::randn({4, 3}), me.mesh("x=2"), {Replicate()});
    const CommPolicyScope strict(CommPolicy::Error);
    EXPECT_THROW(sharded.nonzero(), ShardingError);
    EXPECT_TRUE(replicated.nonzero().defined());
    EXPECT_THROW(sharded.split(1, 0), ShardingError);
    EXPECT_EQ(sharded.split(1, 1).size(), 3u);
  });
}

// Replicas draw equal numbers, and the numbers do not depend on the placements.
TEST(EveryOp, GatheredRandomOpsDrawEqualNumbers) {
  const auto rates = torch::rand({5, 3}).mul(9);
  for (int n : {2, 3})
    run_ranks(n, [&](Rank&) {
      const auto mesh = init_device_mesh("cpu", {n}, {"x"});
      std::vector<at::Tensor> drawn;
      for (const auto& p : {Replicate(), Shard(0), Shard(1)}) {
        manual_seed(7);
        drawn.push_back(DTensor(at::poisson(distribute_tensor(rates, mesh, {p}))).full_tensor());
      }
      EXPECT_TRUE(at::equal(drawn[0], drawn[1]) && at::equal(drawn[0], drawn[2]));
      EXPECT_GT(drawn[0].sum().item<float>(), 0);
      const at::Tensor x = distribute_tensor(rates.sub(4), mesh, {Shard(0)});
      const auto leaky = at::rrelu(x, 0.1, 0.3, /*training=*/true);
      const auto slope = DTensor(leaky).full_tensor().div(rates.sub(4));
      EXPECT_TRUE(
          slope.ge(0.099).logical_and(slope.le(0.301)).logical_or(slope.sub(1).abs().lt(1e-5)).all().item<bool>());
    });
}

// ---- families ----

TEST(EveryOp, MatrixOpsKeepABatchSharded) {
  const auto base = torch::randn({5, 3, 3}, torch::kDouble);
  const auto a = base.matmul(base.transpose(1, 2)) + torch::eye(3, torch::kDouble);
  expect_value_and_gradient(a, [](const at::Tensor& x) { return at::linalg_inv(x); });
  expect_value_and_gradient(a, [](const at::Tensor& x) { return at::linalg_det(x); });
  expect_value_and_gradient(a, [](const at::Tensor& x) { return at::linalg_cholesky(x); });
  expect_value_and_gradient(a, [](const at::Tensor& x) { return at::linalg_solve(x, x.tril()); });
  expect_value_and_gradient(a, [](const at::Tensor& x) { return std::get<0>(at::linalg_eigh(x)); });
  expect_same_value(a, [](const at::Tensor& x) { return at::linalg_matrix_exp(x); });  // its gradient is plain
  expect_value_and_gradient(a, [](const at::Tensor& x) { return std::get<1>(at::linalg_slogdet(x)); });
  expect_value_and_gradient(a, [](const at::Tensor& x) { return at::linalg_svdvals(x); });
  expect_value_and_gradient(a, [](const at::Tensor& x) { return at::cdist(x, x.mul(2)); });
  run_ranks(2, [&](Rank& me) {
    const at::Tensor x = distribute_tensor(a, me.mesh("x=2"), {Shard(0)});
    const CommPolicyScope strict(CommPolicy::Error);
    EXPECT_EQ(DTensor(std::get<0>(at::linalg_inv_ex(x))).placements()[0], Shard(0));
  });
}

TEST(EveryOp, ImageOpsKeepTheBatchSharded) {
  namespace F = torch::nn::functional;
  const auto image = torch::randn({5, 2, 6, 4}, torch::kDouble);
  expect_value_and_gradient(image, [](const at::Tensor& x) { return at::upsample_bilinear2d(x, {3, 7}, false); });
  expect_value_and_gradient(image, [](const at::Tensor& x) { return at::upsample_nearest2d(x, {9, 5}); });
  expect_value_and_gradient(image, [](const at::Tensor& x) { return at::reflection_pad2d(x, {1, 2, 1, 0}); });
  expect_value_and_gradient(image, [](const at::Tensor& x) { return at::replication_pad2d(x, {1, 2, 1, 0}); });
  expect_value_and_gradient(image, [](const at::Tensor& x) { return at::pixel_unshuffle(x, 2); });
  expect_value_and_gradient(image, [](const at::Tensor& x) { return at::im2col(x, {2, 2}, {1, 1}, {0, 0}, {1, 1}); });
  expect_value_and_gradient(image, [](const at::Tensor& x) { return std::get<0>(at::adaptive_max_pool2d(x, {3, 2})); });
  const auto grid = torch::rand({5, 3, 2, 2}, torch::kDouble);
  expect_value_and_gradient(grid, [](const at::Tensor& g) {
    return at::grid_sampler(g.permute({0, 3, 1, 2}).contiguous(), g, 0, 0, false);
  });
  const auto volume = torch::randn({5, 2, 4, 6, 4}, torch::kDouble);
  expect_value_and_gradient(volume, [](const at::Tensor& x) { return at::avg_pool3d(x, {2, 2, 2}); });
  expect_value_and_gradient(volume, [](const at::Tensor& x) { return at::max_pool3d(x, {2, 2, 2}); });
}

TEST(EveryOp, ReductionsAndScans) {
  const auto value = torch::randn({5, 3}, torch::kDouble);
  expect_value_and_gradient(value, [](const at::Tensor& x) { return x.nansum(0); });
#if TORCH_VERSION_MINOR >= 13  // it has a derivative
  expect_value_and_gradient(value, [](const at::Tensor& x) { return std::get<0>(at::aminmax(x, 0)); });
#endif
  expect_value_and_gradient(value, [](const at::Tensor& x) { return std::get<0>(at::std_mean(x, 1)); });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return x.trace(); });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return x.logcumsumexp(0); });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return std::get<0>(x.cummax(0)); });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return x.diag_embed(); });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return x.renorm(2, 0, 0.5); });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return std::get<0>(x.kthvalue(2, 0)); });
  expect_same_value(value, [](const at::Tensor& x) { return x.count_nonzero(); });
  expect_same_value(value, [](const at::Tensor& x) {
    const ImplicitReplication plain;
    return at::bucketize(x, torch::linspace(-1, 1, 5, torch::kDouble));
  });
  expect_same_value(value,
                    [](const at::Tensor& x) { return at::one_hot(x.gt(0).to(torch::kLong), 3).to(torch::kDouble); });
  expect_same_value(value, [](const at::Tensor& x) { return x.clone().cumsum_(1); });
}

// LibTorch's derivatives of these ops select elements by a mask, or read indices on the host.
TEST(EveryOp, GradientsOfFilledValuesNeedNoGather) {
  const auto value = torch::randn({5, 3}, torch::kDouble);
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("x=2");
    const auto run = [&](const TensorFn& place, const TensorFn& replicate) {
      auto x = place(value).set_requires_grad(true), fill = replicate(torch::tensor(2.5, torch::kDouble));
      fill.set_requires_grad(true);
      const auto index = replicate(torch::tensor({0, 2}));
      const auto y = x.masked_fill(x.detach().gt(0), fill).pow(2) + x.index_fill(1, index, fill).pow(3);
      return torch::autograd::grad({y.sum()}, {x, fill});
    };
    const TensorFn same = [](const at::Tensor& t) { return t.clone(); };
    const auto expected = run(same, same);
    const CommPolicyScope strict(CommPolicy::Error);
    const auto found =
        run([&](const at::Tensor& t) -> at::Tensor { return distribute_tensor(t, mesh, {Shard(0)}); },
            [&](const at::Tensor& t) -> at::Tensor { return distribute_tensor(t, mesh, {Replicate()}); });
    for (size_t i = 0; i < 2; i++) expect_value(found[i], expected[i]);
  });
}

// Twice: the first derivative scatters the gradient to the positions of the maxima.
TEST(EveryOp, SecondDerivativesOfMaxima) {
  const auto value = torch::randn({5, 3}, torch::kDouble);
  const auto second = [](const at::Tensor& x) {
    const auto y = std::get<0>(x.max(1)).pow(3).sum();
    const auto first = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {x})[0];
  };
  const auto expected = second(value.clone().set_requires_grad(true));
  run_ranks(2, [&](Rank& me) {
    for (const auto& p : single_placements(value))
      expect_value(second(distribute_tensor(value, me.mesh("x=2"), {p}).set_requires_grad(true)), expected);
  });
}

TEST(EveryOp, ComplexNumbers) {
  const auto value = torch::randn({5, 4}, torch::kDouble);
  const auto pairs = torch::randn({5, 3, 2}, torch::kDouble);
  // Rotary embedding. The dim with real and imaginary parts is not sharded.
  const std::vector<Placement> but_the_last = {Replicate(), Shard(0), Shard(1)};
  expect_like_plain(pairs, but_the_last, 4, expect_value, [](const at::Tensor& x) {
    const auto z = at::view_as_complex(x * 1);
    return at::view_as_real(z * z.conj() + z).flatten(1);
  });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return at::real(at::fft_fft(x, {}, 0)); });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return at::fft_irfft(at::fft_rfft(x, {}, 1) * 2, 4, 1); });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return at::abs(at::complex(x, x * 2)); });
  // A conjugate view is redistributed with its values, not with the memory of its base.
  run_ranks(2, [&](Rank& me) {
    const auto z = at::complex(value, value * 2);
    const at::Tensor x = distribute_tensor(z, me.mesh("x=2"), {Shard(0)});
    EXPECT_TRUE(torch::allclose(DTensor(x.conj()).full_tensor(), z.conj()));
    EXPECT_TRUE(torch::allclose(DTensor(at::imag(x.conj())).full_tensor(), at::imag(z.conj())));
  });
}

// A local tensor of one element counts as contiguous with any stride.
TEST(EveryOp, RealPartsOfOneElementPerRank) {
  const auto z = at::complex(torch::randn({3, 2}), torch::randn({3, 2}));
  run_ranks(2, [&](Rank& me) {
    const at::Tensor x = distribute_tensor(z, me.mesh("x=2"), {Shard(0)});
    EXPECT_TRUE(torch::equal(DTensor(at::imag(x)).full_tensor(), at::imag(z)));
    const auto columns = DTensor(at::real(x)).redistribute({Shard(1)});
    EXPECT_TRUE(torch::equal(columns.full_tensor(), at::real(z)));
    const auto plain = z.slice(0, 0, 2).slice(1, 0, 1);  // one element per rank
    const at::Tensor one = distribute_tensor(plain, me.mesh("x=2"), {Shard(0)});
    EXPECT_TRUE(torch::equal(DTensor(at::real(one)).full_tensor(), at::real(plain)));
    // Both inputs are gathered by one collective.
    expect_value(at::block_diag({at::real(one), at::imag(one)}), at::block_diag({at::real(plain), at::imag(plain)}));
    EXPECT_TRUE(torch::allclose(DTensor(at::real(x).sum(0)).full_tensor(), at::real(z).sum(0)));
    expect_value(at::real(x).norm(std::numeric_limits<double>::infinity()),
                 at::real(z).norm(std::numeric_limits<double>::infinity()));
  });
  run_ranks(4, [&](Rank& me) {
    const at::Tensor x = distribute_tensor(z, me.mesh("x=4"), {Shard(0)});
    const double inf = std::numeric_limits<double>::infinity();
    expect_value(x.norm(inf), z.norm(inf));
  });
}

// ---- views that return a list ----

TEST(EveryOp, SplitChunkAndUnbindAlongTheShardedDim) {
  const auto value = torch::randn({6, 4, 2});
  expect_value_and_gradient(value, [](const at::Tensor& x) { return x.split(4, 0)[1] * 2; });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return x.chunk(3, 0)[2] + x.chunk(3, 0)[0]; });
  expect_value_and_gradient(value, [](const at::Tensor& x) { return x.unbind(1)[2].exp(); });
  run_ranks(2, [&](Rank& me) {
    torch::NoGradGuard no_grad;
    at::Tensor x = distribute_tensor(value, me.mesh("x=2"), {Shard(0)});
    x.split(2, 0)[1].zero_();
    auto expected = value.clone();
    expected.split(2, 0)[1].zero_();
    expect_value(x, expected);
  });
}

TEST(EveryOp, MultiheadAttentionWithEveryPlacement) {
  torch::manual_seed(3);
  torch::nn::MultiheadAttention attention(8, 2);
  const auto value = torch::randn({5, 3, 8});  // (sequence, batch, features)
  const auto plain = std::get<0>(attention(value, value, value));
  for (int n : {2, 3})
    run_ranks(n, [&](Rank&) {
      const auto mesh = init_device_mesh("cpu", {n}, {"x"});
      for (const auto& p : {Replicate(), Shard(0), Shard(1), Shard(2)}) {
        SCOPED_TRACE(c10::str(n, " ranks, ", to_string(p)));
        const ImplicitReplication plain_parameters;
        torch::NoGradGuard no_grad;
        const at::Tensor x = distribute_tensor(value, mesh, {p});
        expect_value(std::get<0>(attention(x, x, x)), plain);
      }
    });
}

}  // namespace
}  // namespace tessera::test
