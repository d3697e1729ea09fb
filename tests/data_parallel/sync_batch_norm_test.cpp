// Compares batch norm over the ranks of a group with plain batch norm on the global batch: outputs, gradients, running
// statistics, communication, errors.
#include "tessera/data_parallel/sync_batch_norm.h"

#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/modules.h"
#include "tessera/testing/detail/host_reads.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

#include <numeric>

namespace tessera {
namespace {

using testing::error_message;
using testing::HostReadCounter;
using testing::Rank;
using testing::run_ranks;
using torch::nn::BatchNormOptions;

// The number of samples of each rank.
using Parts = std::vector<int64_t>;
const std::vector<Parts> kParts = {{6}, {3, 3}, {1, 5}, {4, 0}, {2, 2, 2, 2}, {0, 3, 1, 2}};

torch::Tensor numbers(std::vector<int64_t> shape, double shift) {
  return torch::sin(torch::arange(c10::multiply_integers(shape), torch::kFloat) * 1.7 + shift).view(shape) * 2 + 0.5;
}
torch::Tensor local_part(const torch::Tensor& global, const Parts& parts, int64_t rank) {
  return global.narrow(0, std::accumulate(parts.begin(), parts.begin() + rank, int64_t{0}),
                       parts[static_cast<size_t>(rank)]);
}
torch::Tensor sum_over_ranks(const torch::Tensor& t, const comm::Group& group) {
  auto sum = t.clone();
  group->all_reduce(sum, ReduceOp::Sum).wait();
  return sum;
}
void expect_close(const torch::Tensor& got, const torch::Tensor& want, const std::string& what) {
  ASSERT_EQ(got.defined(), want.defined()) << what;
  if (!got.defined()) return;
  EXPECT_EQ(got.sizes(), want.sizes()) << what;
  EXPECT_EQ(got.scalar_type(), want.scalar_type()) << what;
  const double tolerance = got.scalar_type() == torch::kBFloat16 ? 2e-2 : 3e-6;
  EXPECT_TRUE(torch::allclose(got, want, tolerance, tolerance)) << what << "\n" << got << "\n" << want;
}

// Trains `plain` on the global batch and `ours` on this rank's local batch. Gradients of weight and bias are local:
// their sum over ranks is compared.
template <class Ours, class Plain>
void expect_same_training(const Rank& me, const Parts& parts, std::vector<int64_t> shape, Ours ours, Plain plain,
                          torch::ScalarType dtype, const std::string& what) {
  shape[0] = std::accumulate(parts.begin(), parts.end(), int64_t{0});
  torch::NoGradGuard no_grad;
  for (auto* t : {&ours->weight, &plain->weight})
    if (t->defined()) t->copy_(numbers({shape[1]}, 3));
  for (auto* t : {&ours->bias, &plain->bias})
    if (t->defined()) t->copy_(numbers({shape[1]}, 5));
  torch::AutoGradMode grad(true);
  for (int step = 0; step < 3; step++) {
    const auto x_global = numbers(shape, step).to(dtype).requires_grad_();
    const auto dy_global = numbers(shape, step + 0.5).to(dtype);
    const auto x = local_part(x_global.detach(), parts, me.rank).clone().requires_grad_();
    ours->zero_grad(), plain->zero_grad();
    const auto y_global = plain->forward(x_global);
    y_global.backward(dy_global);

    CommDebugMode mode;
    const auto y = ours->forward(x);
    EXPECT_EQ(mode.get_comm_counts().of(comm::CommKind::AllGatherIntoTensor), me.size() > 1)
        << what << mode.debug_string();
    y.backward(local_part(dy_global, parts, me.rank));
    EXPECT_EQ(mode.get_comm_counts().of(comm::CommKind::AllReduce), me.size() > 1) << what;
    EXPECT_EQ(mode.get_total_counts(), me.size() > 1 ? 2 : 0) << what;
    mode.exit();

    expect_close(y, local_part(y_global, parts, me.rank), what + " y");
    expect_close(x.grad(), local_part(x_global.grad(), parts, me.rank), what + " dx");
    if (plain->weight.defined()) {
      expect_close(sum_over_ranks(ours->weight.grad(), me.group()), plain->weight.grad(), what + " dw");
      expect_close(sum_over_ranks(ours->bias.grad(), me.group()), plain->bias.grad(), what + " db");
    }
    expect_close(ours->running_mean, plain->running_mean, what + " running_mean");
    expect_close(ours->running_var, plain->running_var, what + " running_var");
    expect_close(ours->num_batches_tracked, plain->num_batches_tracked, what + " num_batches_tracked");
  }
  ours->eval(), plain->eval();
  const auto x = numbers(shape, 9).to(dtype);
  if (plain->running_mean.defined()) {
    CommDebugMode mode;
    expect_close(ours->forward(x), plain->forward(x), what + " eval");
    EXPECT_EQ(mode.get_total_counts(), 0) << what;
  }
}

template <class Ours, class Plain>
void expect_same_training(const std::vector<int64_t>& shape, const BatchNormOptions& options, const char* what,
                          torch::ScalarType dtype = torch::kFloat) {
  for (const auto& parts : kParts)
    run_ranks(static_cast<int64_t>(parts.size()), [&](Rank& me) {
      Ours ours(options);
      convert_sync_batchnorm(*ours);
      expect_same_training(me, parts, shape, ours, Plain(options), dtype, c10::str(what, " ", parts));
    });
}

TEST(SyncBatchNorm, IsBatchNormOfTheGlobalBatch) {
  const BatchNormOptions three(3);
  expect_same_training<nn::BatchNorm1d, torch::nn::BatchNorm1d>({0, 3}, three, "1d");
  expect_same_training<nn::BatchNorm1d, torch::nn::BatchNorm1d>({0, 3, 5}, three, "1d of sequences");
  expect_same_training<nn::BatchNorm2d, torch::nn::BatchNorm2d>({0, 3, 4, 2}, three, "2d");
  expect_same_training<nn::BatchNorm3d, torch::nn::BatchNorm3d>({0, 3, 2, 2, 3}, three, "3d");
}

TEST(SyncBatchNorm, SupportsAllOptionsOfTheModule) {
  const BatchNormOptions three(3);
  const std::pair<const char*, BatchNormOptions> kOptions[] = {
      {"momentum", BatchNormOptions(3).momentum(0.3).eps(0.1)},
      {"momentum none", BatchNormOptions(3).momentum(std::nullopt)},
      {"not affine", BatchNormOptions(3).affine(false)},
      {"not tracked", BatchNormOptions(3).track_running_stats(false)},
      {"neither", BatchNormOptions(3).affine(false).track_running_stats(false)},
  };
  for (const auto& [what, options] : kOptions)
    expect_same_training<nn::BatchNorm2d, torch::nn::BatchNorm2d>({0, 3, 2, 2}, options, what);
  expect_same_training<nn::BatchNorm2d, torch::nn::BatchNorm2d>({0, 3, 2, 2}, three, "bfloat16", torch::kBFloat16);
}

TEST(SyncBatchNorm, AsASeparateModule) {
  run_ranks(2, [](Rank& me) {
    const BatchNormOptions options(3);
    expect_same_training(me, {1, 4}, {0, 3, 2, 2}, nn::SyncBatchNorm(options), torch::nn::BatchNorm2d(options),
                         torch::kFloat, "own module");
    std::ostringstream text;
    text << *nn::SyncBatchNorm(options);
    EXPECT_EQ(text.str(), "tessera::nn::SyncBatchNorm(3, eps=1e-05, group='world')");
    EXPECT_ERROR(UsageError, nn::SyncBatchNorm(options)(torch::ones(3)), "[3]", "(N, 3, ...)");
  });
}

// Means are far from zero and from each other: the sum of squares minus the square of the sum would be rounding error.
TEST(SyncBatchNorm, LargeMeansDoNotSpoilTheVariance) {
  run_ranks(2, [](Rank& me) {
    nn::BatchNorm1d norm(BatchNormOptions(1).momentum(1.0));
    convert_sync_batchnorm(*norm);
    const auto global = (numbers({8, 1}, 0) * 0.01 + torch::tensor({4096., 4097.}).repeat_interleave(4).view({8, 1}));
    norm(local_part(global.to(torch::kFloat), {4, 4}, me.rank));
    const auto want = global.to(torch::kFloat).to(torch::kDouble).var().item<double>();
    EXPECT_NEAR(norm->running_var.item<double>(), want, 1e-3 * want);  // a float represents 4096 to within 1e-4
  });
}

// Converts layers with and without a holder; clones; an input that needs no gradient.
TEST(SyncBatchNorm, ConvertsAModelInPlace) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    nn::Sequential model(nn::Linear(3, 4), nn::BatchNorm1d(4), torch::nn::BatchNorm1d(4));  // last: no holder
    const auto weight = model->ptr(2)->named_parameters()["weight"];
    convert_sync_batchnorm(*model, mesh["dp"]);
    convert_sync_batchnorm(*model, mesh["dp"]);  // changes nothing
    EXPECT_TRUE(model->ptr(2)->named_parameters()["weight"].is_same(weight));
    for (auto& each : {model, clone(model)}) {
      auto called = each;
      CommDebugMode mode;
      const auto y = called(numbers({2, 3}, static_cast<double>(me.rank)));
      EXPECT_EQ(mode.get_total_counts(), 2);
      EXPECT_EQ(mode.get_bytes_by_axis().count("dp"), 1u);
      y.sum().backward();
      EXPECT_EQ(mode.get_total_counts(), 4);
    }
    CommDebugMode mode;
    nn::BatchNorm1d first(4);
    convert_sync_batchnorm(*first, mesh["dp"]);
    first(numbers({2, 4}, 0)).sum().backward();  // only weight and bias: their gradients are local
    EXPECT_EQ(mode.get_total_counts(), 1);
    EXPECT_ERROR(UsageError, convert_sync_batchnorm(*model), "batch norm '1'", "group 'dp'", "requested: 'world'");
    EXPECT_ERROR(UsageError, convert_sync_batchnorm(*model, mesh), "name one of its 2 axes");
  });
}

TEST(SyncBatchNorm, DoesNotCopyToTheHost) {
  run_ranks(2, [](Rank&) {
    nn::BatchNorm1d norm(BatchNormOptions(3).momentum(std::nullopt));
    convert_sync_batchnorm(*norm);
    HostReadCounter mode;
    const OpModeScope on(mode);
    norm(numbers({2, 3}, 0).requires_grad_()).sum().backward();
    EXPECT_EQ(mode.reads, 0);
    EXPECT_GT(mode.ops, 0);
  });
}

TEST(SyncBatchNorm, AnEmptyBatchBehavesAsInPlainBatchNorm) {
  run_ranks(2, [](Rank&) {
    nn::BatchNorm1d norm(3), plain(3);
    convert_sync_batchnorm(*norm);
    const auto x = torch::ones({0, 3}, torch::requires_grad());
    const auto y = norm(x);
    plain(x);
    EXPECT_EQ(y.sizes(), x.sizes());
    y.sum().backward();
    EXPECT_TRUE(torch::equal(norm->weight.grad(), torch::zeros(3)));
    EXPECT_TRUE(torch::equal(norm->running_var, plain->running_var));
    EXPECT_TRUE(torch::equal(norm->num_batches_tracked, plain->num_batches_tracked));
  });
}

struct TypedImpl : torch::nn::Module {
  nn::BatchNorm1d a{register_module("a", nn::BatchNorm1d(2))};
  torch::nn::BatchNorm1d b{register_module("b", torch::nn::BatchNorm1d(2))};
};

TEST(SyncBatchNorm, Errors) {
  run_ranks(2, [](Rank& me) {
    nn::BatchNorm1d norm(3);
    convert_sync_batchnorm(*norm);
    // One value per channel on one rank, none on the other: both throw, and nothing changes.
    EXPECT_ERROR(UsageError, norm(torch::ones({me.rank, 3})), "expected more than 1 value per channel", "group 'world'",
                 me.rank == 0 ? "[0, 3]" : "[1, 3]");
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 0);
    EXPECT_TRUE(torch::equal(norm->running_var, torch::ones(3)));
    norm(torch::ones({1, 3}));  // one value on each rank is enough
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);

    EXPECT_ERROR(UsageError, norm(torch::ones({2, 4})), "[2, 4]", "(N, 3, ...)");
    EXPECT_ERROR(UsageError, norm(torch::ones({2, 3, 1, 1})), "BatchNorm1d", "[2, 3, 1, 1]");
    EXPECT_ERROR(UsageError, norm(distribute_tensor(torch::ones({2, 3}), me.mesh("dp=2"), {Shard(0)})), "is a DTensor",
                 "to_local()");

    const auto typed = std::make_shared<TypedImpl>();
    EXPECT_ERROR(UsageError, convert_sync_batchnorm(*typed), "module 'b'", "tessera::nn::BatchNorm1d");
    EXPECT_EQ(typed->a->hooks(), nullptr);

    const auto x = numbers({2, 3}, 0).requires_grad_();
    const auto dx = torch::autograd::grad({norm(x).square().sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    EXPECT_ERROR(c10::Error, dx.sum().backward(), "batch norm over a group is not implemented");
  });
}

}  // namespace
}  // namespace tessera
