// PyTorch's test of DDP with tensor parallelism, under its name: four processes with shm and with gloo, and with shm
// on one GPU if there is one, on a 2 x 2 mesh. The original compares parameters and gradients in loops over empty
// lists. Here each one is compared on every rank, before and after the step, and must be a DTensor with the same name.
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tests/fixtures/devices.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using comm::CommKind;
using fixtures::mesh_on_device;
using fixtures::on_device;
using testing::close;
using testing::Rank;

constexpr int64_t kTpDegree = 2;

struct Variant {
  bool by_mesh;
  bool gradient_as_bucket_view;
  bool static_graph;
};

// Every parameter of the 2-D model is a DTensor and equals the reference's parameter of the same name.
void check_module(const Module& reference, const Module& two_d, bool check_grad) {
  const auto wanted = reference.named_parameters();
  const auto found = two_d.named_parameters();
  ASSERT_EQ(found.size(), wanted.size());
  ASSERT_EQ(found.size(), 4u);
  for (const auto& item : found) {
    ASSERT_TRUE(item.key().starts_with("module.net")) << item.key();
    const auto& expected = wanted[item.key()];
    ASSERT_TRUE(is_dtensor(item.value())) << item.key();
    const DTensor value(check_grad ? item.value().grad() : item.value());
    EXPECT_EQ(value.placements(), DTensor(item.value()).placements()) << item.key();
    EXPECT_EQ(close(DTensor(value.detach()).full_tensor(), check_grad ? expected.grad() : expected.detach()), "")
        << item.key() << (check_grad ? ".grad" : "");
  }
}

int64_t all_reduces(const CommDebugMode& mode) {
  return mode.get_comm_counts().of(CommKind::AllReduce) +
         mode.get_comm_counts().of(CommKind::AllReduce, comm::Family::C10d);
}

void test_2d_ddp_integration(Rank& me, const Variant& variant) {
  const auto mesh =
      mesh_on_device(me, std::vector<int64_t>{me.size() / kTpDegree, kTpDegree}, std::vector<std::string>{"dp", "tp"});
  const DeviceMesh unnamed("cpu", torch::arange(4).view({-1, 2}));  // the original also creates it
  auto plain = on_device(models::MLP(models::mlp_module())), parallel = on_device(models::MLP(models::mlp_module()));

  parallelize_module(parallel, mesh["tp"], {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
  EXPECT_EQ(pre_dp_module_transform(*parallel).size(), 4u);
  DDPOptions options{.gradient_as_bucket_view = variant.gradient_as_bucket_view, .static_graph = variant.static_graph};
  DistributedDataParallel reference(plain, options);
  if (variant.by_mesh)
    options.device_mesh = mesh["dp"];
  else
    options.process_group = mesh.get_group("dp");
  DistributedDataParallel two_d(parallel, options);
  check_module(*reference, *two_d, false);

  optim::Adam reference_optim(reference->parameters(), {.lr = 3e-5}), two_d_optim(two_d->parameters(), {.lr = 3e-5});
  const int64_t dp_rank = mesh.get_local_rank("dp");
  torch::manual_seed(dp_rank + 1);
  const auto input = on_device(torch::rand({4, 10}));
  const auto expected = reference(input);
  torch::Tensor output;
  {
    CommDebugMode comm;
    output = two_d(input);
    EXPECT_EQ(comm.get_total_counts(), 1);  // the output of net2
    EXPECT_EQ(all_reduces(comm), 1);
    EXPECT_EQ(comm.get_bytes_by_axis().count("dp"), 0u);
  }
  EXPECT_EQ(close(output, expected), "");

  expected.sum().backward();
  {
    CommDebugMode comm;
    output.sum().backward();
    EXPECT_EQ(comm.get_total_counts(), 1);  // one bucket, over dp
    EXPECT_EQ(all_reduces(comm), 1);
    EXPECT_EQ(comm.get_bytes_by_axis().count("tp"), 0u);
    const int64_t local_numel = 10 * 8 + 8 + 8 * 10 + 10;
    EXPECT_EQ(comm.get_bytes_by_axis().at("dp"), local_numel * 4);
  }
  check_module(*reference, *two_d, true);

  reference_optim.step();
  two_d_optim.step();
  check_module(*reference, *two_d, false);
  EXPECT_NE(close(DTensor(two_d->named_parameters()["module.net1.weight"].detach()).full_tensor(),
                  on_device(models::MLP(models::mlp_module())->named_parameters()["net1.weight"].detach()), {0, 1e-6}),
            "");  // the step changed the parameters

  torch::manual_seed(dp_rank + 1004);
  const auto again = on_device(torch::rand({16, 10}));
  EXPECT_EQ(close(two_d(again), reference(again)), "");
}

void test_2d_ddp_on_four_ranks(const Variant& variant) {
  fixtures::spawn_ranks_on_each_device(4, [&](Rank& me) { test_2d_ddp_integration(me, variant); });
}

TEST(Test2dParallel, test_2d_ddp_integration_functionality) { test_2d_ddp_on_four_ranks({false, false, false}); }
TEST(Test2dParallel, by_device_mesh) { test_2d_ddp_on_four_ranks({true, false, false}); }
TEST(Test2dParallel, gradient_as_bucket_view_and_static_graph) { test_2d_ddp_on_four_ranks({true, true, true}); }

}  // namespace
}  // namespace tessera
