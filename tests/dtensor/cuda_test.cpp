// DTensors on a GPU with one rank and NCCL. NCCL does not support several ranks on one GPU.
#include "small_models.h"

#include "tessera/comm/world.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace tessera::test {
namespace {

TEST(Cuda, TrainsLikeThePlainModel) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no CUDA device on this machine, or a build without CUDA";
  InitOptions options;
  options.backend = "nccl";
  init(options);
  auto start = mlp();
  for (auto& [name, t] : start.parameters) t = t.to(at::kCUDA);
  start.x = start.x.to(at::kCUDA);
  start.y = start.y.to(at::kCUDA);
  auto plain = copy(start);
  auto model = distribute(start, init_device_mesh("cuda", {1}, {"tp"}));
  const auto expected = train(plain, Optimizer::Sgd, 5), got = train(model, Optimizer::Sgd, 5);
  for (size_t i = 0; i < expected.size(); i++) EXPECT_NEAR(got[i], expected[i], 1e-5) << "loss of step " << i;
  EXPECT_TRUE(DTensor(model.parameters.begin()->second.detach()).to_local().is_cuda());
  destroy();
}

}  // namespace
}  // namespace tessera::test
