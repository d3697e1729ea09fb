// PyTorch's tests of FSDP with tensor parallelism, under their names: four processes with shm and with gloo, and with
// shm on one GPU if there is one, on a 2 x 2 mesh. Test bodies that are missing in the source document are written
// here.
#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tests/fixtures/devices.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using comm::CommKind;
using comm::Family;
using fixtures::mesh_on_device;
using fixtures::on_device;
using testing::close;
using testing::Rank;

constexpr int64_t kTp = 2;
constexpr double kLr = 3e-5;

// A parameter of the model: its name, global shape, and the dim that tensor parallelism shards.
struct ParamInfo {
  const char* name;
  std::vector<int64_t> shape;
  std::optional<int64_t> shard_dim = {};
  bool complete = true;  // its gradient covers the batches of both tp ranks

  std::vector<int64_t> local() const {
    auto sizes = shape;
    if (shard_dim) sizes[static_cast<size_t>(*shard_dim)] /= kTp;
    return sizes;
  }
  int64_t local_numel() const { return c10::multiply_integers(local()); }
  int64_t numel() const { return c10::multiply_integers(shape); }
};
const std::vector<ParamInfo> kParams{{"net1.weight", {8, 5}, 0},          {"net1.bias", {8}, 0},
                                     {"net2.weight", {4, 8}, 1},          {"net2.bias", {4}},
                                     {"net3.weight", {12, 4}, {}, false}, {"net3.bias", {12}, {}, false}};

at::Tensor rand_of(int64_t seed) {
  torch::manual_seed(seed);
  return on_device(torch::rand({2, 3, 5}));
}

at::Tensor gathered(const at::Tensor& x, const comm::Group& group) {
  auto out = torch::empty({group->size() * x.numel()}, x.options());
  group->all_gather_into_tensor(out, x.contiguous()).wait();
  return out;
}

// net3 ran only on this tp rank's batch, so its gradient is summed over tp. Then all are divided: means over four
// ranks.
void sync_tp_grads(const Tensors& flat_params, const comm::Group& tp, const comm::Group& dp) {
  Tensors complete;
  for (const auto& param : kParams)
    complete.push_back(torch::full({param.local_numel()}, param.complete, torch::kBool));
  const auto all = torch::cat(complete).chunk(dp->size())[dp->rank()];
  for (const auto& flat : flat_params) {
    const auto mask = all.to(flat.grad().device());
    auto summed = flat.grad().clone();
    tp->all_reduce(summed, ReduceOp::Sum).wait();
    flat.grad().copy_(torch::where(mask, flat.grad(), summed).div_(kTp));
  }
}

// All gradients, gathered and concatenated; equal on every rank.
at::Tensor flattened_grads(const Module& module, const comm::Group& fsdp, const comm::Group& tp) {
  Tensors local;
  for (const auto& p : module.parameters())
    local.push_back((p.grad().defined() ? p.grad() : torch::zeros_like(p)).detach().reshape(-1));
  auto flat = gathered(torch::cat(local), fsdp);
  if (!tp) return flat;
  Tensors full;
  int64_t offset = 0;
  for (const auto& param : kParams) {
    auto gradient = flat.narrow(0, offset, param.local_numel());
    offset += param.local_numel();
    if (param.shard_dim) {
      Tensors both;
      for (const auto& each : gathered(gradient, tp).chunk(kTp)) both.push_back(each.view(param.local()));
      gradient = torch::cat(both, *param.shard_dim);
    }
    full.push_back(gradient.reshape(-1));
  }
  return torch::cat(full);
}

// Sharded parameter and gradient do not share memory with the unsharded parameters.
void expect_outside_of_compute(models::MLP& model, const Tensors& flat_params, bool offload) {
  std::vector<const void*> compute;
  {
    const SummonFullParams full_params(*model);
    for (const auto& p : model->parameters())
      compute.push_back((is_dtensor(p) ? DTensor(p.detach()).to_local() : p).storage().data());
  }
  for (const auto& flat : flat_params) {
    const bool on_cpu = offload || fixtures::test_device.is_cpu();
    EXPECT_TRUE(flat.is_cpu() == on_cpu && flat.grad().is_cpu() == on_cpu);
    for (const auto* at : compute) {
      EXPECT_NE(flat.storage().data(), at);
      EXPECT_NE(flat.grad().storage().data(), at);
    }
  }
}

void integration(Rank& me, bool offload, ShardingStrategy strategy, bool use_orig_params) {
  SCOPED_TRACE(c10::str(offload ? "offload " : "", strategy, use_orig_params ? " use_orig_params" : ""));
  const auto mesh = mesh_on_device(me, std::string("dp=2,tp=2"));
  const auto tp = mesh.get_group("tp"), dp = mesh.get_group("dp");
  torch::manual_seed(0);
  auto model = on_device(models::MLP(models::simple_model()));
  auto tp_model = clone(model);
  const auto input = rand_of(me.rank + 1);
  EXPECT_EQ(close(model(input), tp_model(input)), "");

  FSDPOptions options{.sharding_strategy = strategy, .offload_params = offload, .use_orig_params = use_orig_params};
  options.device_mesh = mesh_on_device(me, std::string("fsdp=4"));
  FullyShardedDataParallel fsdp(model, options);
  parallelize_module(tp_model, mesh["tp"],
                     {{"net1", ColwiseParallel({.input_layouts = Shard(0)})},
                      {"net2", RowwiseParallel({.output_layouts = Shard(0)})}});
  EXPECT_TRUE(is_dtensor(tp_model->layers[0]->weight) && is_dtensor(tp_model->layers[1]->weight));
  options.device_mesh = mesh["dp"];
  FullyShardedDataParallel tp_fsdp(tp_model, options);
  EXPECT_EQ(fsdp->flat_params()[0].numel(), 36);
  EXPECT_EQ(tp_fsdp->flat_params()[0].numel(), 52);

  const auto expected = fsdp(input);
  torch::Tensor output;
  {
    CommDebugMode comm;
    output = tp_fsdp(input);
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllGatherIntoTensor), 1);
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::ReduceScatterTensor), 1);
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllGatherIntoTensor, Family::C10d), 1);
    EXPECT_EQ(comm.get_total_counts(), 3);
  }
  EXPECT_EQ(output.sizes(), (std::vector<int64_t>{2, 3, 12}));
  EXPECT_EQ(close(output, expected), "");

  expected.sum().backward();
  {
    CommDebugMode comm;
    output.sum().backward();
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllGatherIntoTensor), 1);
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::ReduceScatterTensor, Family::C10d), 1);
    EXPECT_EQ(comm.get_total_counts(), 2);
  }
  sync_tp_grads(tp_fsdp->flat_params(), tp, dp);
  EXPECT_EQ(close(flattened_grads(*tp_model, dp, tp), flattened_grads(*model, me.group(), {})), "");
  expect_outside_of_compute(tp_model, tp_fsdp->flat_params(), offload);

  optim::SGD opt(fsdp->parameters(), {.lr = kLr}), tp_opt(tp_fsdp->parameters(), {.lr = kLr});
  opt.step();
  tp_opt.step();
  const auto again = rand_of(me.rank + 16);
  EXPECT_EQ(close(tp_fsdp(again), fsdp(again)), "");
}

TEST(TestTPFSDPIntegration, test_fsdp_tp_integration) {
  fixtures::spawn_ranks_on_each_device(4, [](Rank& me) {
    for (const bool offload : {false, true})
      for (const auto strategy : {ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp})
        for (const bool use_orig_params : {false, true}) integration(me, offload, strategy, use_orig_params);
  });
}

struct NormImpl : torch::nn::Cloneable<NormImpl> {
  explicit NormImpl(int64_t dim) : dim(dim) { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones(dim)); }
  torch::Tensor forward(torch::Tensor x) {
    return x * torch::rsqrt(x.pow(2).mean(-1, /*keepdim=*/true) + 1e-6) * weight;
  }
  int64_t dim;
  torch::Tensor weight;
};
TESSERA_MODULE(Norm);

struct NormedImpl : torch::nn::Cloneable<NormedImpl> {
  NormedImpl() { reset(); }
  void reset() override {
    mlp = register_module("mlp", models::MLP(models::mlp_module()));
    mlp_norm = register_module("mlp_norm", Norm(10));
  }
  torch::Tensor forward(torch::Tensor x) { return mlp(mlp_norm(x)); }
  models::MLP mlp{nullptr};
  Norm mlp_norm{nullptr};
};
TESSERA_MODULE(Normed);

TEST(TestTPFSDPIntegration, test_fsdp_tp_extension_grad) {
  fixtures::spawn_ranks_on_each_device(4, [](Rank& me) {
    const auto mesh = mesh_on_device(me, std::string("dp=2,tp=2"));
    const auto tp = mesh["tp"];
    auto model = on_device(Normed());
    parallelize_module(model, tp,
                       {{"mlp.net1", ColwiseParallel({.input_layouts = Shard(0)})},
                        {"mlp.net2", RowwiseParallel({.output_layouts = Shard(0)})}});
    distribute_module(
        *model->mlp_norm, tp,
        {.input = [](Module&, const Tensors& in,
                     const DeviceMesh& m) { return Tensors{DTensor::from_local(in[0], m, {Shard(0)})}; },
         .output = [](Module&, const Tensors& out, const DeviceMesh&) { return Tensors{DTensor(out[0]).to_local()}; }});
    FullyShardedDataParallel fsdp(model, {.device_mesh = mesh["dp"]});
    EXPECT_EQ(fsdp->flat_params()[0].numel(), 94);
    torch::manual_seed(me.rank);
    const auto input = on_device(torch::rand({2, 10})).requires_grad_();
    CommDebugMode comm;
    fsdp(input).sum().backward();
    const auto& counts = comm.get_comm_counts();
    EXPECT_EQ(counts.of(CommKind::ReduceScatterTensor), 2);
    EXPECT_EQ(counts.of(CommKind::AllGatherIntoTensor), 2);
    EXPECT_EQ(counts.of(CommKind::AllReduce), 1);
    EXPECT_EQ(counts.of(CommKind::AllGatherIntoTensor, Family::C10d), 1);
    EXPECT_EQ(counts.of(CommKind::ReduceScatterTensor, Family::C10d), 1);
    EXPECT_EQ(comm.get_total_counts(), 7) << comm.debug_string();
    for (const auto& p : fsdp->parameters()) EXPECT_FALSE(p.grad().isnan().any().item<bool>());
  });
}

struct SyncedImpl : torch::nn::Module {
  explicit SyncedImpl(const DeviceMesh& tp) {
    param = register_parameter("param", DTensor::from_local(on_device(torch::randn({8, 8})), tp, {Replicate()}));
    buf = register_buffer("buf", DTensor::from_local(on_device(torch::randn({8, 8})), tp, {Replicate()}));
  }
  torch::Tensor forward(torch::Tensor x) { return x; }
  torch::Tensor param, buf;
};
TESSERA_MODULE(Synced);

TEST(TestTPFSDPIntegration, test_fsdp_tp_sync_module_state) {
  fixtures::spawn_ranks_on_each_device(4, [](Rank& me) {
    const auto mesh = mesh_on_device(me, std::string("dp=2,tp=2"));
    const auto dp = mesh.get_group("dp"), tp = mesh.get_group("tp");
    torch::manual_seed(me.rank);
    Synced model(mesh["tp"]);
    const auto equal = [](const torch::Tensor& t, const comm::Group& group) {
      const auto all = gathered(DTensor(t.detach()).to_local().reshape(-1), group).chunk(group->size());
      return torch::equal(all[0], all[1]);
    };
    EXPECT_FALSE(equal(model->param, dp));
    EXPECT_FALSE(equal(model->buf, dp));
    FullyShardedDataParallel fsdp(model, {.device_mesh = mesh["dp"], .sync_module_states = true});
    const SummonFullParams full_params(*model);
    EXPECT_TRUE(equal(model->param, dp));
    EXPECT_TRUE(equal(model->buf, dp));
    EXPECT_FALSE(equal(model->param, tp));  // not synchronized over tp
  });
}

}  // namespace
}  // namespace tessera
