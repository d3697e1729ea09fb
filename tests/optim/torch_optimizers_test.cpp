// The six optimizers of torch::optim on distributed parameters: same values as on plain ones, and the communication.
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/full_tensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;
using Parameters = std::vector<torch::Tensor>;

// Uneven local tensors, some of them empty.
struct ShapeAndPlacement {
  std::vector<int64_t> shape;
  Placement placement;
};
const ShapeAndPlacement kLayouts[] = {{{5, 4}, Shard(0)}, {{7}, Replicate()}, {{3, 5}, Shard(1)}, {{1, 6}, Shard(0)}};

torch::Tensor value(const std::vector<int64_t>& shape, double shift) {
  return torch::sin(torch::arange(c10::multiply_integers(shape), torch::kFloat) * 0.7 + shift).view(shape);
}

// sum of (p - target)^4 / 4: no step reaches the minimum, and all elements have different gradients.
struct Problem {
  Parameters parameters, targets;

  torch::Tensor loss() const {
    torch::Tensor sum;
    for (size_t i = 0; i < parameters.size(); i++) {
      const auto one = (parameters[i] - targets[i]).pow(4).sum() / 4;
      sum = sum.defined() ? sum + one : one;
    }
    return sum;
  }
};
Problem problem(const DeviceMesh& mesh) {
  Problem result;
  for (const auto& [shape, placement] : kLayouts) {
    const auto distribute = [&, &shape = shape, &placement = placement](const torch::Tensor& t) {
      return mesh ? at::Tensor(distribute_tensor(t, mesh, {placement}, {.src_data_rank = {}})) : t;
    };
    result.parameters.push_back(distribute(value(shape, 0)).detach().requires_grad_());
    result.targets.push_back(distribute(value(shape, 2)).detach());
  }
  return result;
}

struct TorchCase {
  const char* name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(Parameters)> make;
};
template <class Kind, class Options>
TorchCase make_case(const char* name, Options options) {
  return {name, [options](Parameters p) { return std::make_unique<Kind>(std::move(p), options); }};
}
const std::vector<TorchCase>& elementwise() {
  using namespace torch::optim;
  static const std::vector<TorchCase> all = {
      make_case<Adagrad>("Adagrad", AdagradOptions(0.1).weight_decay(0.1).lr_decay(0.1)),
      make_case<Adam>("Adam", AdamOptions(0.1).amsgrad(true).weight_decay(0.1)),
      make_case<AdamW>("AdamW", AdamWOptions(0.1)),
      make_case<RMSprop>("RMSprop", RMSpropOptions(0.1).momentum(0.9).centered(true)),
      make_case<SGD>("SGD", SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1)),
  };
  return all;
}

void expect_same(const Problem& ours, const Problem& plain, const std::string& what) {
  for (size_t i = 0; i < plain.parameters.size(); i++) {
    EXPECT_TRUE(torch::allclose(fixtures::full_tensor(ours.parameters[i]), plain.parameters[i], 1e-5, 1e-6))
        << what << " " << i;
    EXPECT_EQ(DTensor(ours.parameters[i]).placements(), PlacementsRef(Placements{kLayouts[i].placement}))
        << what << " " << i;
  }
}

TEST(TorchOptimizers, ElementwiseOptimizersDoNotCommunicate) {
  for (const int64_t n : {1, 2, 3})
    run_ranks(n, [&](Rank& me) {
      for (const auto& one : elementwise()) {
        const auto ours = problem(me.mesh({n}, {"tp"})), plain = problem({});
        const auto optimizer = one.make(ours.parameters), reference = one.make(plain.parameters);
        for (int step = 0; step < 4; step++) {
          reference->zero_grad();
          plain.loss().backward();
          reference->step();
          optimizer->zero_grad();
          ours.loss().backward();
          for (size_t i = 0; i < ours.parameters.size(); i++) {  // the gradient of the {1, 6} parameter may be R
            const torch::NoGradGuard no_grad;  // with grad mode the result is a view, which zero_grad() cannot detach
            auto& gradient = ours.parameters[i].mutable_grad();
            gradient = DTensor(gradient).redistribute({kLayouts[i].placement});
          }
          const CommDebugMode mode;
          optimizer->step();
          EXPECT_EQ(mode.get_total_counts(), 0) << one.name << "\n" << mode.debug_string();
        }
        expect_same(ours, plain, one.name);
      }
    });
}

// LBFGS works on one flat vector that is replicated, so its dot products need no communication. One evaluation
// communicates the loss, the gradients of the flat vector (together) and, in backward, the {1, 6} parameter.
TEST(TorchOptimizers, LBFGSGathersTheGradients) {
  for (const int64_t n : {1, 2, 3})
    run_ranks(n, [&](Rank& me) {
      for (const bool search : {false, true}) {
        const auto options = torch::optim::LBFGSOptions(0.5).max_iter(5);
        const auto ours = problem(me.mesh({n}, {"tp"})), plain = problem({});
        int64_t evaluations = 0;
        const auto run = [&](const Problem& problem) {
          torch::optim::LBFGS optimizer(
              problem.parameters,
              search ? torch::optim::LBFGSOptions(options).line_search_fn("strong_wolfe") : options);
          const auto closure = [&] {
            evaluations++;
            optimizer.zero_grad();
            auto loss = problem.loss();
            loss.backward();
            return loss;
          };
          for (int step = 0; step < 3; step++) optimizer.step(closure);
        };
        run(plain);
        evaluations = 0;
        CommDebugMode mode;
        run(ours);
        mode.exit();
        EXPECT_EQ(mode.get_total_counts(), n == 1 ? 0 : 3 * evaluations) << mode.debug_string();
        expect_same(ours, plain, search ? "strong_wolfe" : "no line search");
      }
    });
}

}  // namespace
}  // namespace tessera
