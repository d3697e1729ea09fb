// The parallel and the plain GPT of `tessera bench tp` have equal losses.
#include "benchmarks/peer_gpt.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::bench {
namespace {

template <class Model>
std::vector<double> train(Model& model, const at::Tensor& tokens) {
  torch::optim::AdamW adam(model.parameters(), torch::optim::AdamWOptions(1e-3));
  const auto in = tokens.narrow(1, 0, tokens.size(1) - 1), target = tokens.narrow(1, 1, tokens.size(1) - 1).flatten();
  std::vector<double> losses;
  for (int step = 0; step < 3; step++) {
    adam.zero_grad();
    const LossParallel scope;
    const at::Tensor loss = at::cross_entropy_loss(model.forward(in).flatten(0, 1), target);
    loss.backward();
    losses.push_back(tessera::detail::full_tensor_or_self(loss.detach()).item<double>());
    adam.step();
  }
  return losses;
}

TEST(PeerGpt, HasTheLossesOfThePlainModel) {
  const PeerGptSizes sizes{.dim = 32, .layers = 2, .vocabulary = 20, .head = 8};
  PeerGpt<TorchLayers> plain(sizes);
  std::vector<at::Tensor> weights;  // before training
  for (const auto& p : plain.parameters()) weights.push_back(p.detach().clone());
  const auto tokens = at::randint(sizes.vocabulary, {2, 9}, at::kLong);
  const auto expected = train(plain, tokens);
  for (int64_t n : {2, 4})
    testing::run_ranks(n, [&](testing::Rank& me) {
      const auto model = std::make_shared<PeerGpt<TesseraLayers>>(sizes);
      {
        at::NoGradGuard no_grad;
        const auto parameters = model->parameters();
        for (size_t i = 0; i < parameters.size(); i++) at::Tensor(parameters[i]).copy_(weights[i]);
      }
      parallelize_module(*model, me.mesh({n}, {"tp"}), peer_gpt_plan(sizes));
      CommDebugMode comm;
      const auto losses = train(*model, tokens);
      for (size_t step = 0; step < losses.size(); step++) EXPECT_NEAR(losses[step], expected[step], 1e-5) << step;
      // Per block two in forward and two in backward, one in backward of the output, three in the loss.
      EXPECT_EQ(comm.get_comm_counts().of(comm::CommKind::AllReduce), 3 * (4 * sizes.layers + 1 + 3));
      EXPECT_EQ(comm.get_total_counts(), comm.get_comm_counts().of(comm::CommKind::AllReduce));
    });
}

}  // namespace
}  // namespace tessera::bench
