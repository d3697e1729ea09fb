// A compiled step that ends with backward: the gradients that it leaves equal those of eager.
#include "tessera/base/error.h"
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include "tests/fixtures/full_tensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

using fixtures::full_tensor;

using ForwardFn = std::function<at::Tensor(const at::Tensor&)>;

struct ParallelWay {
  const char* name;
  // Parallelizes a model and returns its forward.
  std::function<ForwardFn(models::MLP&, const DeviceMesh&)> parallelize;
};

template <class Model>
ForwardFn forward_of(Model model) {
  return [model](const at::Tensor& x) mutable { return model(x); };
}

ForwardFn ddp_forward(models::MLP& model, const DDPOptions& options) {
  auto ddp = std::make_shared<DistributedDataParallel<models::MLP>>(model, options);
  return [ddp](const at::Tensor& x) { return (*ddp)(x); };
}

const std::vector<ParallelWay> kParallelWays{
    {"one device", [](models::MLP& model, const DeviceMesh&) { return forward_of(model); }},
    {"DDP", [](models::MLP& model, const DeviceMesh& mesh) { return ddp_forward(model, {.device_mesh = mesh}); }},
    {"DDP with views",
     [](models::MLP& model, const DeviceMesh& mesh) {
       return ddp_forward(model, {.device_mesh = mesh, .gradient_as_bucket_view = true});
     }},
    {"fully_shard",
     [](models::MLP& model, const DeviceMesh& mesh) {
       for (auto& layer : model->layers) fully_shard(layer, {.mesh = mesh});
       fully_shard(model, {.mesh = mesh});
       return forward_of(model);
     }},
    {"tensor parallel",
     [](models::MLP& model, const DeviceMesh& mesh) {
       parallelize_module(model, mesh, {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
       return forward_of(model);
     }},
};

struct Trained {
  std::vector<at::Tensor> gradients, parameters;
};

// The step, compiled or eager, computes the gradients. The optimizer step is eager.
Trained train(const ParallelWay& way, const Rank& me, const at::Tensor& x, const models::MLP& start, bool compiled,
              bool clipped) {
  const CompileScope no_codegen({.codegen = false});
  const auto mesh = init_device_mesh(me.world, "cpu", {me.world.size()}, {"dp"});
  auto model = clone(start);
  const auto forward = way.parallelize(model, mesh);
  optim::AdamW optimizer(model->parameters(), {.lr = 0.1, .fused = true});
  const auto step = [&forward, clipped](models::MLP&, optim::AdamW& optimizer, const at::Tensor& x) {
    optimizer.zero_grad();
    auto loss = full_tensor(forward(x).pow(2).mean());
    loss.backward();
    if (clipped) optim::clip_grad_norm_(optimizer.parameters(), 1e-2);
    return loss.detach();
  };
  auto program = compile(step);
  Trained result;
  for (int i = 0; i < 3; i++) {
    const auto mine = x[i] * (1 + (way.name[0] == 'D' ? me.rank : 0));
    compiled ? program(model, optimizer, mine) : step(model, optimizer, mine);
    for (const auto& p : model->parameters()) result.gradients.push_back(full_tensor(p.grad()).clone());
    optimizer.step();
  }
  for (const auto& p : model->parameters()) result.parameters.push_back(full_tensor(p.detach()).clone());
  return result;
}

TEST(CompiledGradients, EqualEager) {
  torch::manual_seed(1);
  const auto x = torch::randn({3, 4, 10});
  const models::MLP start(models::mlp_module());
  for (const auto& way : kParallelWays)
    for (const bool clipped : {false, true}) {
      SCOPED_TRACE(c10::str(way.name, clipped ? ", clipped" : ""));
      run_ranks(2, [&](Rank& me) {
        const auto want = train(way, me, x, start, false, clipped), got = train(way, me, x, start, true, clipped);
        for (size_t i = 0; i < want.gradients.size(); i++)
          EXPECT_TRUE(at::allclose(got.gradients[i], want.gradients[i], 1e-5, 1e-7)) << "gradient " << i;
        for (size_t i = 0; i < want.parameters.size(); i++)
          EXPECT_TRUE(at::allclose(got.parameters[i], want.parameters[i], 1e-5, 1e-6)) << "parameter " << i;
      });
    }
}

// A GradScaler has host state, so a compiled step must contain all of its calls or none.
TEST(CompiledGradients, GradScalerWithoutUpdateIsAnError) {
  models::MLP model(models::mlp_module());
  optim::AdamW optimizer(model->parameters(), {.fused = true});
  optim::GradScaler scaler;
  auto step = compile([&](models::MLP& model, optim::AdamW& optimizer, const at::Tensor& x) {
    optimizer.zero_grad();
    scaler.scale(model(x).sum()).backward();
    scaler.unscale_(optimizer);
  });
  EXPECT_ERROR(UsageError, step(model, optimizer, torch::ones({2, 10})), "has unscale_ or step in it and no update()");
  scaler.scale(model(torch::ones({2, 10})).sum()).backward();
  EXPECT_NO_THROW(scaler.unscale_(optimizer));  // the failed trace left no state in the scaler
}

}  // namespace
}  // namespace tessera
