// PyTorch's tests of the parallelize API, under their names: four processes with shm and with gloo, and with shm on one
// GPU if there is one; every collective is counted. All parameters and gradients are compared on every rank, also where
// the original compares on rank 0 only.
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/mlp.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tests/fixtures/devices.h"
#include "tests/fixtures/full_tensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using comm::CommKind;
using fixtures::full_tensor;
using fixtures::mesh_on_device;
using fixtures::on_device;
using testing::close;
using testing::Rank;

// The expected number of collectives of each kind; of other kinds none.
struct ExpectedComm {
  int64_t scatter = 0, broadcast = 0, all_reduce = 0, all_gather = 0;
};
void expect_comm(const CommDebugMode& mode, const ExpectedComm& expected, const char* when) {
  const auto& counts = mode.get_comm_counts();
  const auto of = [&](CommKind kind) { return counts.of(kind) + counts.of(kind, comm::Family::C10d); };
  EXPECT_EQ(of(CommKind::Scatter), expected.scatter) << when;
  EXPECT_EQ(of(CommKind::Broadcast), expected.broadcast) << when;
  EXPECT_EQ(of(CommKind::AllReduce), expected.all_reduce) << when;
  EXPECT_EQ(of(CommKind::AllGather) + of(CommKind::AllGatherIntoTensor), expected.all_gather) << when;
  EXPECT_EQ(counts.total(), expected.scatter + expected.broadcast + expected.all_reduce + expected.all_gather) << when;
}

// Runs a body on four ranks with the same seed, as PyTorch's test processes do.
void on_four_ranks(const std::function<void(Rank&)>& body) {
  fixtures::spawn_ranks_on_each_device(4, [&](Rank& me) {
    torch::manual_seed(1234);
    body(me);
  });
}

void compare_parameters(Module& local, Module& dist, bool gradients = false) {
  for (const auto& item : local.named_parameters()) {
    const auto other = get_parameter(dist, item.key());
    EXPECT_TRUE(is_dtensor(other)) << item.key();
    const auto expected = gradients ? item->grad() : item->detach();
    EXPECT_EQ(close(full_tensor(gradients ? other.grad() : other.detach()), expected), "")
        << item.key() << (gradients ? ".grad" : "");
  }
}

struct Expected {
  ExpectedComm setup, forward, backward;
};

template <class H>
void compare_module(H& local, const Plan& plan, std::vector<int64_t> size, Rank& me, const Expected& expected,
                    bool rowwise = false) {
  auto dist = clone(local);
  const auto mesh = mesh_on_device(me, std::string("tp=4"));
  {
    CommDebugMode comm;
    parallelize_module(dist, mesh, plan);
    expect_comm(comm, expected.setup, "setup");
  }
  torch::optim::SGD local_optim(local->parameters(), 0.25), dist_optim(dist->parameters(), 0.25);
  torch::manual_seed(0);
  auto input = on_device(torch::rand(size));
  compare_parameters(*local, *dist);

  auto local_output = local(input);
  if (rowwise) input = input.chunk(4, -1)[me.rank];
  torch::Tensor dist_output;
  {
    CommDebugMode comm;
    dist_output = full_tensor(dist(input));
    expect_comm(comm, expected.forward, "forward");
  }
  EXPECT_EQ(close(dist_output, local_output), "");

  local_output.sum().backward();
  {
    CommDebugMode comm;
    dist_output.sum().backward();
    expect_comm(comm, expected.backward, "backward");
  }
  compare_parameters(*local, *dist, /*gradients=*/true);
  local_optim.step(), dist_optim.step();
  compare_parameters(*local, *dist);
}

const Style kGathered = ColwiseParallel{.output_layouts = Replicate()};

TEST(TensorParallelAPITests, test_linear_row_wise_parallel) {
  on_four_ranks([](Rank& me) {
    torch::manual_seed(5);
    auto model = on_device(nn::Linear(16, 10));
    compare_module(model, RowwiseParallel(), {9, 16}, me,
                   {.setup = {.scatter = 1, .broadcast = 1}, .forward = {.all_reduce = 1}, .backward = {}},
                   /*rowwise=*/true);
  });
}

TEST(TensorParallelAPITests, test_linear_col_wise_parallel) {
  on_four_ranks([](Rank& me) {
    torch::manual_seed(5);
    auto model = on_device(nn::Linear(10, 16));
    compare_module(model, ColwiseParallel{.output_layouts = Replicate()}, {8, 10}, me,
                   {.setup = {.scatter = 2}, .forward = {.all_gather = 1}, .backward = {}});
  });
}

TEST(TensorParallelAPITests, test_prepare_module_input) {
  on_four_ranks([](Rank& me) {
    nn::Identity module;
    const auto mesh = mesh_on_device(me, std::string("tp=4"));
    parallelize_module(module, mesh,
                       PrepareModuleInput{.input_layouts = Shard(0), .desired_input_layouts = Replicate()});
    const auto input = on_device(torch::rand({5, 7}));
    CommDebugMode comm;
    const DTensor output = module(input);
    EXPECT_EQ(output.sizes(), (std::vector<int64_t>{20, 7}));
    EXPECT_EQ(close(output.redistribute({Shard(0)}).to_local(), input), "");
    expect_comm(comm, {.all_gather = 1}, "forward");
  });
}

TEST(TensorParallelAPITests, test_prepare_module_output) {
  on_four_ranks([](Rank& me) {
    nn::Identity module;
    const auto mesh = mesh_on_device(me, std::string("tp=4"));
    parallelize_module(module, mesh,
                       PrepareModuleOutput{.output_layouts = Replicate(), .desired_output_layouts = Shard(0)});
    torch::manual_seed(15);
    const auto input = DTensor::from_local(on_device(torch::rand({16, 7})), mesh, {Replicate()});
    CommDebugMode comm;
    const auto output = module(input);
    EXPECT_FALSE(is_dtensor(output));
    EXPECT_EQ(close(output, input.redistribute({Shard(0)}).to_local()), "");
    expect_comm(comm, {}, "forward");
  });
}

// net2 has 10 features over 4 ranks: 3, 3, 3, 1.
const Expected kTwoGathered{.setup = {.scatter = 4}, .forward = {.all_gather = 2}, .backward = {.all_reduce = 1}};

void gathered_mlp(const Plan& plan) {
  on_four_ranks([&](Rank& me) {
    auto model = on_device(models::MLP(models::mlp_module()));
    compare_module(model, plan, {12, 10}, me, kTwoGathered);
  });
}

TEST(TensorParallelAPITests, test_parallelize_module_with_star) { gathered_mlp({{"net*", kGathered}}); }
TEST(TensorParallelAPITests, test_parallelize_module_with_question) { gathered_mlp({{"net?", kGathered}}); }
TEST(TensorParallelAPITests, test_parallelize_module_with_digit) { gathered_mlp({{"net[1-2]", kGathered}}); }
TEST(TensorParallelAPITests, test_parallelize_mlp_with_module_api) {
  gathered_mlp({{"net1", kGathered}, {"net2", kGathered}});
}

TEST(TensorParallelAPITests, test_parallelize_mlp_with_module_api_nested) {
  on_four_ranks([](Rank& me) {
    nn::Sequential model({{"dummy_encoder", models::MLP(models::mlp_module())}});
    model->to(fixtures::test_device);
    compare_module(model, {{"dummy_encoder.net1", kGathered}, {"dummy_encoder.net2", kGathered}}, {12, 10}, me,
                   kTwoGathered);
  });
}

TEST(TensorParallelAPITests, test_parallelize_module_multi_wildcard) {
  on_four_ranks([](Rank& me) {
    auto model = on_device(models::MLPStacked(2));
    compare_module(
        model, {{"layers.*.net[1]", ColwiseParallel()}, {"layers.*.net[2]", RowwiseParallel()}}, {12, 10}, me,
        {.setup = {.scatter = 6, .broadcast = 2}, .forward = {.all_reduce = 2}, .backward = {.all_reduce = 1}});
  });
}

TEST(TensorParallelAPITests, test_prepare_module_input_output) {
  on_four_ranks([](Rank& me) {
    nn::Identity module;
    const auto mesh = mesh_on_device(me, std::string("tp=4"));
    parallelize_module(module, mesh,
                       PrepareModuleInputOutput{.input_layouts = Shard(0),
                                                .desired_input_layouts = Replicate(),
                                                .output_layouts = Replicate(),
                                                .desired_output_layouts = Shard(1)});
    const auto input = on_device(torch::rand({5, 7}));
    torch::Tensor output;
    {
      CommDebugMode comm;
      output = module(input);
      expect_comm(comm, {.all_gather = 1}, "forward");
    }
    EXPECT_EQ(output.sizes(), (std::vector<int64_t>{20, me.rank < 3 ? 2 : 1}));  // 7 columns over 4 ranks
    EXPECT_EQ(close(output, DTensor::from_local(input, mesh, {Shard(0)}).redistribute({Shard(1)}).to_local()), "");
  });
}

TEST(TensorParallelAPITests, test_parallelize_module_src_data_rank) {
  on_four_ranks([](Rank& me) {
    const auto mesh = mesh_on_device(me, std::string("tp=4"));
    auto own_weights = [](int64_t rank) {
      torch::manual_seed(static_cast<uint64_t>(rank));
      return on_device(nn::Linear(10, 16));
    };
    {
      auto model = own_weights(me.rank);
      CommDebugMode comm;
      parallelize_module(model, mesh, ColwiseParallel(), {.src_data_rank = 1});
      EXPECT_GT(comm.get_total_counts(), 0);
      EXPECT_EQ(close(full_tensor(model->weight.detach()), own_weights(1)->weight.detach()), "");
    }
    {
      auto model = own_weights(me.rank);
      CommDebugMode comm;
      parallelize_module(model, mesh, ColwiseParallel(), {.src_data_rank = std::nullopt});
      EXPECT_EQ(comm.get_total_counts(), 0);
      const auto own = own_weights(me.rank)->weight.detach().chunk(4)[me.rank];
      EXPECT_EQ(close(DTensor(model->weight.detach()).to_local(), own), "");
    }
  });
}

TEST(TensorParallelAPITests, test_under_devicemesh_context) {
  on_four_ranks([](Rank& me) {
    auto model = on_device(models::MLP(models::mlp_module()));
    const MeshScope scope(mesh_on_device(me, std::string("tp=4")));
    parallelize_module(*model, {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    EXPECT_TRUE(is_dtensor(get_parameter(*model, "net1.weight")));
  });
}

TEST(TensorParallelAPITests, test_empty_plan) {
  on_four_ranks([](Rank& me) {
    auto model = on_device(models::MLP(models::mlp_module()));
    CommDebugMode comm;
    parallelize_module(*model, mesh_on_device(me, std::string("tp=4")), std::nullopt);
    EXPECT_EQ(comm.get_total_counts(), 0);
    for (const auto& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
  });
}

TEST(TensorParallelAPITests, test_parallelize_module_with_root_module) {
  on_four_ranks([](Rank& me) {
    torch::manual_seed(5);
    auto model = on_device(nn::Linear(16, 10));
    compare_module(model, {{"", RowwiseParallel()}}, {9, 16}, me,
                   {.setup = {.scatter = 1, .broadcast = 1}, .forward = {.all_reduce = 1}, .backward = {}},
                   /*rowwise=*/true);
  });
}

TEST(TensorParallelAPITests, test_parallelize_module_with_no_match) {
  on_four_ranks([](Rank& me) {
    auto model = on_device(models::MLP(models::mlp_module()));
    const auto mesh = mesh_on_device(me, std::string("tp=4"));
    const Plan plan{{"net1", ColwiseParallel()}, {"non_existent_layer", ColwiseParallel()}};
    EXPECT_ERROR(UsageError, parallelize_module(model, mesh, plan), "non_existent_layer", "net1");
    for (const auto& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));  // the plan was not applied
    parallelize_module(model, mesh, plan, {.unmatched = Unmatched::Warn});
    EXPECT_TRUE(is_dtensor(get_parameter(*model, "net1.weight")));
    EXPECT_FALSE(is_dtensor(get_parameter(*model, "net2.weight")));
  });
}

}  // namespace
}  // namespace tessera
