// What a new user does wrong, or first: empty handles, printing, torch::save, data_ptr, tensors that differ between
// ranks, unusual dtypes. Each gives the right value or an error that says what to write. And ops that write arguments
// without declaring it.
#include "compare_with_plain.h"

#include "tessera/base/error.h"
#include "tessera/comm/collectives.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

namespace tessera::test {
namespace {

TEST(EmptyHandles, ThrowInsteadOfCrashing) {
  const DTensor d;
  const std::vector<std::function<void()>> calls = {
      [&] { d.placements(); },
      [&] { d.device_mesh(); },
      [&] { d.spec(); },
      [&] { d.to_local(); },
      [&] { d.full_tensor(); },
      [&] { d.redistribute({}); },
      [&] { d.redistribute(DeviceMesh(), {}); },
      [&] { distribute_tensor(d, DeviceMesh()); },
      [&] { DTensor::from_local(d, DeviceMesh()); },
  };
  for (const auto& call : calls) EXPECT_THROW(call(), UsageError);
  EXPECT_ERROR(UsageError, d.placements(), "undefined", "distribute_tensor");
  EXPECT_EQ(c10::str(d), "DTensor(undefined)");

  const DeviceMesh mesh;
  const std::vector<std::function<void()>> mesh_calls = {
      [&] { (void)mesh.ndim(); },           [&] { (void)mesh.size(); },     [&] { (void)mesh.size(0); },
      [&] { (void)mesh.shape(); },          [&] { (void)mesh.names(); },    [&] { (void)mesh.device_type(); },
      [&] { (void)mesh.ranks(); },          [&] { (void)mesh.mesh(); },     [&] { (void)mesh.axis("x"); },
      [&] { (void)mesh.get_group(); },      [&] { (void)mesh.get_rank(); }, [&] { (void)mesh.get_local_rank(); },
      [&] { (void)mesh.get_coordinate(); }, [&] { (void)mesh["x"]; },       [&] { (void)mesh.flatten(); },
      [&] { (void)zeros({2}, mesh); },
  };
  for (const auto& call : mesh_calls) EXPECT_THROW(call(), UsageError);
  EXPECT_ERROR(UsageError, mesh.shape(), "init_device_mesh");
  EXPECT_TRUE(mesh == DeviceMesh() && mesh.hash() == DeviceMesh().hash() && c10::str(mesh) == "(no mesh)");

  const World world;
  const std::vector<std::function<void()>> world_calls = {
      [&] { (void)world.rank(); },         [&] { (void)world.size(); },
      [&] { (void)world.group(); },        [&] { (void)world.store(); },
      [&] { (void)world.new_group({0}); }, [&] { (void)world.shared_group({0}); },
      [&] { (void)world.random(); },       [&] { world.abort("x"); },
      [&] { (void)world.backend(); },      [&] { (void)init_device_mesh(world, "cpu", {1}); },
  };
  for (const auto& call : world_calls) EXPECT_THROW(call(), UsageError);
}

TEST(FirstContact, PlainFunctionsSayThatTheTensorIsDistributed) {
  run_ranks(2, [](Rank& me) {
    const DTensor d = distribute_tensor(torch::arange(6.).view({3, 2}), me.mesh("x=2"), {Shard(0)});
    const at::Tensor t = d;
    std::ostringstream out;
    out << d;
    EXPECT_CONTAINS(out.str(), "DTensor(f32[3, 2][S(0)] on mesh(x=2))");
    EXPECT_CONTAINS(out.str(), c10::str("local tensor of rank ", me.rank, ", [", me.rank == 0 ? 2 : 1, ", 2]"));
    EXPECT_ERROR(c10::Error, t.data_ptr(), "DTensor", "to_local()");
    EXPECT_ERROR(c10::Error, t.storage(), "distributed", "to_local()");
    EXPECT_ERROR(c10::Error, out << t, "DTensor", "full_tensor()");
    EXPECT_ERROR(c10::Error, torch::save(t, out), "DTensor", "full_tensor()");
    EXPECT_ERROR(ShardingError, t.to_sparse(), "to_local()", "full_tensor()");
    EXPECT_ERROR(ShardingError, d.redistribute({Replicate()}).to_sparse(), "to_local()", "full_tensor()");
    auto parameter = torch::ones({4});
    distribute_in_place(parameter, me.mesh("x=2"), {Shard(0)});
    EXPECT_ERROR(c10::Error, parameter.data_ptr(), "DTensor", "to_local()");
    parameter.set_data(t * 2);  // a parameter has a TensorImpl of its own, which copies the text
    EXPECT_ERROR(c10::Error, parameter.data_ptr(), "DTensor", "to_local()");
    const at::Tensor plain_again = t * 2;
    plain_again.set_data(torch::ones({2}));
    EXPECT_TRUE(plain_again.has_storage());
    EXPECT_EQ(plain_again.data_ptr<float>()[1], 1);
  });
}

// Rank 2 has an empty shard, for which LibTorch's copy_ checks nothing.
TEST(FirstContact, AllRanksRejectAnInPlaceOpThatWouldChangeTheSizes) {
  run_ranks(3, [](Rank& me) {
    const auto mesh = me.mesh("x=3");
    const at::Tensor row = distribute_tensor(torch::zeros({1, 4}), mesh, {Shard(1)}),
                     rows = distribute_tensor(torch::ones({5, 4}), mesh, {Shard(1)});
    EXPECT_ERROR(c10::Error, row.copy_(rows), "[1, 4]", "doesn't match the broadcast shape [5, 4]");
    EXPECT_ERROR(c10::Error, row.add_(rows), "[1, 4]", "doesn't match the broadcast shape [5, 4]");
    EXPECT_ERROR(c10::Error, row.mul_(rows), "[1, 4]", "doesn't match the broadcast shape [5, 4]");
  });
}

// A shard of one element is contiguous with any stride. cat() gathers two of them in one collective, as bytes.
TEST(FirstContact, OneElementWithAnotherStride) {
  run_ranks(2, [](Rank& me) {
    const at::Tensor x = distribute_tensor(torch::arange(24.).view({2, 3, 4}), me.mesh("x=2"), {Shard(0)});
    const at::Tensor y = x.select(2, 2).slice(1, 1, 2);  // [2, 1], strides [12, 4]
    expect_value(torch::cat({y, y}, 0), torch::tensor({6., 18., 6., 18.}).view({4, 1}));
  });
}

TEST(FirstContact, MeshesOfUnknownDevices) {
  run_ranks(1, [](Rank&) {
    EXPECT_ERROR(UsageError, init_device_mesh("xyz", {1}), "'xyz'", "\"cpu\"");
    if (!torch::cuda::is_available()) EXPECT_ERROR(UsageError, init_device_mesh("cuda", {1}), "no CUDA", "\"cpu\"");
  });
}

// All ranks throw, and the message names the layout, the rank and what differs.
TEST(FirstContact, TensorsThatDifferBetweenRanks) {
  run_ranks(3, [](Rank& me) {
    const auto mesh = me.mesh("x=3");
    const bool odd = me.rank == 1;
    EXPECT_ERROR(
        UsageError,
        DTensor::from_local(odd ? torch::ones({2}) : torch::ones({2, 4}), mesh, {Shard(0)}, {.run_check = true}),
        "[S(0)] on mesh(x=3)", "rank 1 has a local tensor of Float[2]", "rank 0 one of Float[2, 4]");
    EXPECT_ERROR(UsageError,
                 DTensor::from_local(torch::ones({2, 4}, odd ? torch::kDouble : torch::kFloat), mesh, {Shard(1)},
                                     {.run_check = true}),
                 "[S(1)] on mesh(x=3)", "rank 1 has a local tensor of Double[2, 4]", "same dtype");
    EXPECT_ERROR(UsageError,
                 DTensor::from_local(torch::ones({odd ? 1 : 2, 4}), mesh, {Replicate()}, {.run_check = true}), "[R]",
                 "it should have");
    DTensor::from_local(torch::ones({2, 4}), mesh, {Shard(1)}, {.run_check = true});
  });
  for (const auto& p : {Shard(0), Replicate()}) {
    std::string message;
    try {
      run_ranks(2, [&](Rank& me) {
        distribute_tensor(torch::ones({me.rank == 0 ? 6 : 4, me.rank == 0 ? 4 : 6}), me.mesh("x=2"), {p});
      });
    } catch (const std::exception& error) {
      message = error.what();
    }
    EXPECT_CONTAINS(message, "distribute_tensor of Float[6, 4]");
    EXPECT_CONTAINS(message, "distribute_tensor of Float[4, 6]");
  }
}

TEST(FirstContact, ArgumentsThatOpsReject) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    const at::Tensor d = distribute_tensor(torch::ones({4, 4}), mesh, {Shard(0)}),
                     scalar = distribute_tensor(torch::ones({}), mesh),
                     batch = distribute_tensor(torch::ones({2, 4, 4}), mesh, {Shard(0)});
    EXPECT_ERROR(c10::Error, d.diagonal(0, 1, 1), "diagonal");
    EXPECT_THROW(scalar.unbind(), c10::Error);
    EXPECT_THROW(scalar.clone().addbmm_(batch, batch), c10::Error);
    EXPECT_THROW(scalar.select(0, 0), c10::Error);
  });
}

// Values that gloo has no type for.
TEST(FirstContact, ComplexAnd16BitIntegersOverGloo) {
  run_ranks(
      2,
      [](Rank& me) {
        const auto mesh = me.mesh("x=2");
        const auto real = torch::arange(12.).view({3, 4});
        for (const auto& value :
             {torch::complex(real, real + 1), real.to(torch::kShort), real.to(torch::kComplexDouble)}) {
          const auto d = distribute_tensor(value, mesh, {Shard(0)});
          EXPECT_TRUE(torch::equal(d.full_tensor(), value));
          EXPECT_TRUE(torch::equal(d.redistribute({Shard(1)}).full_tensor(), value));
          EXPECT_TRUE(torch::equal(DTensor(d.sum(0, false, value.scalar_type())).full_tensor(),
                                   value.sum(0, false, value.scalar_type())));
          EXPECT_TRUE(torch::equal(DTensor(d.sum(0, false, value.scalar_type())).redistribute({Shard(0)}).full_tensor(),
                                   value.sum(0, false, value.scalar_type())));
          EXPECT_TRUE(torch::equal(distribute_tensor(value, mesh, {Replicate()}).to_local(), value));
        }
        auto c = torch::complex(real, real);
        EXPECT_ERROR(c10::Error, me.group()->all_reduce(c, ReduceOp::Max).wait(), "ComplexFloat");
      },
      {.backend = "gloo"});
}

// ---- writes that the schema does not declare ----

// Running statistics of batch norm in every combination of placements, on one and two mesh axes.
TEST(HiddenWrites, RunningStatistics) {
  const auto image = torch::linspace(-1, 1, 5 * 4 * 3).view({5, 4, 3}), weight = torch::linspace(1, 2, 4);
  run_ranks(4, [&](Rank& me) {
    for (const auto& mesh : {me.mesh("x=4"), me.mesh("x=2,y=2")}) {
      std::vector<Placements> of_image, of_channels;
      const auto all = [&](const std::vector<Placement>& some) {
        std::vector<Placements> result;
        for (const auto& p : some)
          for (const auto& q : some) {
            if (mesh.ndim() == 2) result.push_back({p, q});
            if (mesh.ndim() == 1 && q == some[0]) result.push_back({p});
          }
        return result;
      };
      for (const auto& input : all({Replicate(), Shard(0), Shard(1), Shard(2)}))
        for (const auto& stats : all({Replicate(), Shard(0)})) {
          SCOPED_TRACE(c10::str("input ", to_string(input), ", statistics ", to_string(stats)));
          auto mean = torch::zeros({4}), var = torch::ones({4});
          const at::Tensor x = distribute_tensor(image, mesh, input, {.src_data_rank = std::nullopt}),
                           w = distribute_tensor(weight, mesh, {}, {.src_data_rank = std::nullopt});
          const at::Tensor d_mean = distribute_tensor(mean, mesh, stats, {.src_data_rank = std::nullopt}),
                           d_var = distribute_tensor(var, mesh, stats, {.src_data_rank = std::nullopt});
          for (bool training : {true, false}) {
            expect_value(at::batch_norm(x, w, w, d_mean, d_var, training, 0.1, 1e-5, false),
                         at::batch_norm(image, weight, weight, mean, var, training, 0.1, 1e-5, false));
            expect_value(d_mean, mean);
            expect_value(d_var, var);
          }
        }
    }
  });
}

// instance_norm repeats the statistics and writes their mean back.
TEST(HiddenWrites, InstanceNorm) {
  const auto image = torch::linspace(-1, 1, 5 * 4 * 6).view({5, 4, 6});
  run_ranks(2, [&](Rank& me) {
    for (const auto& p : {Replicate(), Shard(0), Shard(1), Shard(2)}) {
      SCOPED_TRACE(c10::str(p));
      auto mean = torch::zeros({4}), var = torch::ones({4});
      const at::Tensor x = distribute_tensor(image, me.mesh("x=2"), {p});
      const at::Tensor d_mean = distribute_tensor(mean, me.mesh("x=2")), d_var = distribute_tensor(var, me.mesh("x=2"));
      expect_value(at::instance_norm(x, {}, {}, d_mean, d_var, true, 0.1, 1e-5, false),
                   at::instance_norm(image, {}, {}, mean, var, true, 0.1, 1e-5, false));
      expect_value(d_mean, mean);
      expect_value(d_var, var);
    }
  });
}

}  // namespace
}  // namespace tessera::test
