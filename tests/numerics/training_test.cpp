#include "tessera/comm/detail/store/sha256.h"
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/mlp.h"
#include "tessera/numerics/numerics.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

namespace ts = tessera;

namespace {

// How a training is distributed: a mesh of axes dp, fsdp and tp in this order.
struct TrainingMesh {
  int64_t dp = 1, fsdp = 1, tp = 1;
  int64_t ranks() const { return dp * fsdp * tp; }
  std::string text() const { return c10::str("dp=", dp, ",fsdp=", fsdp, ",tp=", tp); }
};

const ts::models::MLPConfig kInvariantMLP = {{{"net1", 12, 48, ts::models::Activation::Sigmoid},
                                              {"net2", 48, 24, ts::models::Activation::Relu},
                                              {"net3", 24, 10, ts::models::Activation::None}},
                                             true,
                                             5};

// Replicated over dp, sharded over fsdp; over tp net1 by columns, net2 by rows.
ts::Placements placements_of(const std::string& name) {
  ts::Placements placements = {ts::Replicate(), ts::Shard(0), ts::Replicate()};
  if (name == "net1.weight" || name == "net1.bias") placements = {ts::Replicate(), ts::Replicate(), ts::Shard(0)};
  if (name == "net2.weight") placements[2] = ts::Shard(1);
  return placements;
}

void append_bytes(std::string& to, const at::Tensor& t) {
  const auto plain = (ts::is_dtensor(t) ? ts::DTensor(t).full_tensor() : t).detach().contiguous();
  to.append(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
}

template <class Optimizer, class Options>
std::string train_mlp(const TrainingMesh& layout, const Options& options, bool invariant = true, int steps = 5) {
  std::string digest;
  std::mutex lock;
  ts::testing::run_ranks(layout.ranks(), [&](ts::testing::Rank& me) {
    const auto mesh = me.mesh(layout.text());
    ts::models::MLP model(kInvariantMLP);
    for (auto& item : model->named_parameters())
      ts::distribute_in_place(item.value(), mesh, placements_of(item.key()), {.src_data_rank = std::nullopt});
    Optimizer optimizer(model->parameters(), options);
    std::string bytes;
    for (int step = 0; step < steps; step++) {
      const auto batch = torch::sin(torch::arange(24 * 12).view({24, 12}) * (0.37 + step));
      const ts::Placements rows = {ts::Shard(0), ts::Shard(0), ts::Replicate()};
      const auto x = ts::distribute_tensor(batch, mesh, rows, {.src_data_rank = std::nullopt});
      const auto target =
          ts::distribute_tensor(batch.narrow(1, 0, 10).exp().contiguous(), mesh, rows, {.src_data_rank = std::nullopt});
      std::optional<ts::NumericsScope> scope;
      if (invariant) scope.emplace(ts::Numerics::Invariant);
      optimizer.zero_grad();
      auto loss = torch::mse_loss(model(x), target);
      loss.backward();
      optimizer.step();
      scope.reset();
      append_bytes(bytes, loss);
    }
    for (const auto& p : model->parameters()) append_bytes(bytes, p);
    for (const auto& p : model->parameters()) append_bytes(bytes, p.grad());
    const std::lock_guard guard(lock);
    ts::comm::store::Sha256 hash;
    hash.update(bytes);
    std::string mine;
    for (const unsigned char byte : hash.finish()) mine += c10::str(byte / 16, ".", byte % 16, " ");
    if (digest.empty()) digest = mine;
    EXPECT_EQ(mine, digest) << "ranks of one mesh differ";
  });
  return digest;
}

const std::vector<TrainingMesh> kTrainingMeshes = {{2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {6, 1, 1}, {1, 2, 1}, {1, 3, 1},
                                                   {1, 4, 1}, {1, 1, 2}, {1, 1, 3}, {1, 1, 4}, {2, 1, 2}, {1, 2, 2},
                                                   {2, 2, 1}, {1, 3, 2}, {2, 1, 3}, {2, 2, 2}};

TEST(InvariantTraining, AdamWGivesTheSameBitsOnEveryMesh) {
  const ts::optim::AdamWOptions options{.lr = 1e-2};
  const auto one_rank = train_mlp<ts::optim::AdamW>({}, options);
  for (const auto& mesh : kTrainingMeshes)
    EXPECT_EQ(train_mlp<ts::optim::AdamW>(mesh, options), one_rank) << mesh.text();
}

TEST(InvariantTraining, SGDGivesTheSameBitsOnEveryMesh) {
  const ts::optim::SGDOptions options{.lr = 1e-2, .momentum = 0.9};
  const auto one_rank = train_mlp<ts::optim::SGD>({}, options);
  for (const auto& mesh : kTrainingMeshes) EXPECT_EQ(train_mlp<ts::optim::SGD>(mesh, options), one_rank) << mesh.text();
}

// The comparison can fail: without the scope, sums have the order of the mesh.
TEST(InvariantTraining, TheDefaultGivesOtherBitsOnOtherMeshes) {
  const ts::optim::AdamWOptions options{.lr = 1e-2};
  const auto one_rank = train_mlp<ts::optim::AdamW>({}, options, false);
  EXPECT_NE(train_mlp<ts::optim::AdamW>({3, 1, 1}, options, false), one_rank);
}

TEST(InvariantTraining, SumsOfSeveralRanksAndUnknownOpsAreRefused) {
  ts::testing::run_ranks(2, [](ts::testing::Rank& me) {
    const auto mesh = me.mesh("dp=2");
    const auto x = ts::DTensor::from_local(torch::ones({4, 4}), mesh, {ts::Partial()});
    const ts::NumericsScope scope(ts::Numerics::Invariant);
    EXPECT_ERROR(ts::UsageError, ts::DTensor(x).redistribute({ts::Replicate()}).to_local(), "tessera::all_reduce",
                 "several ranks");
    EXPECT_ERROR(ts::UsageError, torch::cumsum(torch::ones({4}), 0), "aten::cumsum", "invariant_ops()");
    EXPECT_EQ(torch::cumsum(torch::ones({4}, torch::kLong), 0)[3].item<int64_t>(), 4);  // integers are exact
  });
}

}  // namespace
