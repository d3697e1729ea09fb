// The product on one page: a mesh, sharded tensors, a matmul, tensor parallelism x FSDP, a train step, the same step
// compiled, a checkpoint loaded on another mesh. Read it first.
#include "tessera/tessera.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>

namespace ts = tessera;

namespace {

struct FeedForwardImpl : torch::nn::Cloneable<FeedForwardImpl> {
  FeedForwardImpl() { reset(); }
  void reset() override {
    up = register_module("up", ts::nn::Linear(12, 30));
    down = register_module("down", ts::nn::Linear(30, 12));
  }
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
  ts::nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(FeedForward);

// The same values on every mesh: parameters are created without memory, sharded, then filled.
FeedForward make_model(const ts::DeviceMesh& mesh) {
  ts::manual_seed(7);
  auto model = ts::deferred_init([] { return FeedForward(); });
  ts::parallelize_module(model, mesh["tp"], {{"up", ts::ColwiseParallel()}, {"down", ts::RowwiseParallel()}},
                         {.src_data_rank = std::nullopt});
  ts::fully_shard(model, {.mesh = mesh["dp"]});
  ts::materialize(model);
  return model;
}

auto train_step() {
  return [](FeedForward& model, ts::optim::AdamW& optimizer, const torch::Tensor& x) {
    optimizer.zero_grad();
    auto loss = (model(x) - x.flip(1)).pow(2).mean();
    loss.backward();
    optimizer.step();
    return loss;
  };
}

// The mean loss of the global batch of 12 rows, of which each dp rank takes its own.
template <class Step>
double run(Step& step, FeedForward& model, ts::optim::AdamW& optimizer, const ts::DeviceMesh& mesh, int number) {
  const int64_t rows = 12 / mesh.size("dp");
  auto batch = torch::sin(torch::arange(12 * 12).view({12, 12}) * (1.0 + number));
  auto loss = step(model, optimizer, batch.narrow(0, mesh.get_local_rank("dp") * rows, rows)).detach().clone();
  ts::all_reduce(loss, ts::ReduceOp::Avg);
  return loss.template item<double>();
}

TEST(Tiny, ShardedMatmulNeedsOneAllReduce) {
  ts::testing::run_ranks(4, [](ts::testing::Rank& me) {
    auto mesh = me.mesh("tp=4");
    auto x = torch::arange(15.0).view({3, 5}), w = torch::arange(35.0).view({5, 7});
    auto x_sharded = ts::distribute_tensor(x, mesh, {ts::Shard(1)});  // 5 columns on 4 ranks: uneven, one rank is empty
    auto w_sharded = ts::distribute_tensor(w, mesh, {ts::Shard(0)});
    ts::CommDebugMode comm;
    ts::DTensor y = torch::mm(x_sharded, w_sharded);
    EXPECT_EQ(ts::Placements(y.placements()), ts::Placements({ts::Partial()}));
    EXPECT_EQ(comm.get_total_counts(), 0);
    EXPECT_TRUE(torch::equal(y.full_tensor(), torch::mm(x, w)));
    EXPECT_EQ(comm.get_total_counts(), 1);
  });
}

TEST(Tiny, TrainsCompilesSavesAndLoadsOnAnotherMesh) {
  std::string folder = (std::filesystem::temp_directory_path() / "tessera_tiny_XXXXXX").string();
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  ts::testing::run_ranks(4, [&](ts::testing::Rank& me) {
    auto mesh = me.mesh("dp=2,tp=2"), other_mesh = me.mesh("dp=1,tp=4");
    auto model = make_model(mesh), other = make_model(other_mesh);
    ts::optim::AdamW optimizer(model->parameters(), {.lr = 1e-2}), other_optimizer(other->parameters(), {.lr = 1e-2});

    auto eager = train_step();
    auto compiled = ts::compile(train_step());
    const double first = run(eager, model, optimizer, mesh, 0);
    EXPECT_NEAR(run(compiled, other, other_optimizer, other_mesh, 0), first, 1e-5);  // mesh and compiler do not matter
    for (int i = 1; i < 10; i++) run(eager, model, optimizer, mesh, i);

    ts::dcp::save(ts::get_model_state_dict(*model), folder + "/step-10");
    auto parameters = ts::get_model_state_dict(*other);
    ts::dcp::load(parameters, folder + "/step-10");
    ts::optim::AdamW no_update(model->parameters(), {.lr = 0.0}), also_none(other->parameters(), {.lr = 0.0});
    const double last = run(eager, model, no_update, mesh, 0);
    EXPECT_NEAR(run(eager, other, also_none, other_mesh, 0), last, 1e-5);
    EXPECT_LT(last, first);
  });
  std::filesystem::remove_all(folder);
}

}  // namespace
