// DTensor: construction, access, redistribution, printing, conversion in place.
#include "tessera/dtensor/dtensor.h"

#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/serialize.h>
#include <torch/torch.h>

#include <sstream>

namespace tessera {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

TEST(DTensor, DistributesAndGathers) {
  for (int n : {1, 2, 3, 4})
    run_ranks(n, [&](Rank& me) {
      const auto mesh = init_device_mesh("cpu", {n}, {"x"});
      const auto value = torch::arange(70.).view({7, 10});
      for (const auto& p : {Replicate(), Shard(0), Shard(1), Shard(-1), Shard(1, 5), StridedShard(0, 2)}) {
        const auto d = distribute_tensor(value + me.rank, mesh, {p});  // rank 0's values are distributed
        EXPECT_EQ(d.sizes(), value.sizes());
        EXPECT_TRUE(is_dtensor(d));
        EXPECT_FALSE(is_dtensor(d.to_local()));
        EXPECT_TRUE(torch::equal(d.full_tensor(), value)) << p;
      }
    });
}

TEST(DTensor, KeepsRequiresGradAndTakesTheSourceRank) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    auto t = torch::full({4}, static_cast<double>(me.rank)).set_requires_grad(true);
    EXPECT_TRUE(distribute_tensor(t, mesh, {Shard(0)}).requires_grad());
    EXPECT_EQ(distribute_tensor(t, mesh, {Replicate()}, {.src_data_rank = 1}).full_tensor()[0].item<double>(), 1);
    EXPECT_EQ(distribute_tensor(t, mesh, {Shard(0)}, {.src_data_rank = std::nullopt}).to_local()[0].item<double>(),
              me.rank);
  });
}

TEST(DTensor, FromLocalInfersOrTakesTheGlobalShape) {
  run_ranks(3, [](Rank& me) {
    const auto mesh = me.mesh("x=3");
    const auto d = DTensor::from_local(torch::full({2, 4}, 1. + me.rank), mesh, {Shard(0)});
    EXPECT_EQ(d.sizes(), at::IntArrayRef({6, 4}));
    const auto uneven = DTensor::from_local(torch::ones({me.rank == 2 ? 1 : 3, 4}), mesh, {Shard(0)},
                                            {.shape = {{7, 4}}, .stride = {{4, 1}}});
    EXPECT_TRUE(torch::equal(uneven.full_tensor(), torch::ones({7, 4})));
    const auto sum = DTensor::from_local(torch::ones({2}), mesh, {Partial()});
    EXPECT_EQ(sum.full_tensor()[0].item<double>(), 3);
    const auto checked = DTensor::from_local(torch::full({2}, 1. + me.rank), mesh, {Replicate()}, {.run_check = true});
    EXPECT_EQ(checked.to_local()[0].item<double>(), 1);
  });
}

TEST(DTensor, FromLocalRejectsWrongShapes) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    const auto wrong = error_message<UsageError>([&] {
      DTensor::from_local(torch::ones({4, 4}), mesh, {Shard(0)}, {.shape = {{7, 4}}, .stride = {{4, 1}}});
      DTensor::from_local(torch::ones({2, 4}), mesh, {Shard(0)}, {.shape = {{7, 4}}, .stride = {{4, 1}}});
    });
    EXPECT_CONTAINS(wrong, "it should have");
    const auto across = error_message<UsageError>([&] {
      DTensor::from_local(torch::ones({2 + me.rank, 4}), mesh, {Shard(0)}, {.run_check = true});
    });
    EXPECT_CONTAINS(across, "[S(0)] on mesh(x=2)");
    EXPECT_CONTAINS(
        error_message<UsageError>([&] { DTensor::from_local(torch::ones({2}), mesh, {Shard(0)}, {.shape = {{4}}}); }),
        "both or neither");
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      DTensor::from_local(torch::ones({2}), mesh, {Shard(0), Shard(0)});
                    }),
                    "one placement per axis");
    EXPECT_CONTAINS(error_message<UsageError>([&] { DTensor(torch::ones({2})); }), "distribute_tensor");
  });
}

// A meta tensor has no values to send. Its BackendMeta is kept.
TEST(DTensor, DistributesMetaTensorsWithoutCommunication) {
  struct Note : c10::BackendMeta {};
  run_ranks(2, [](Rank&) {
    const auto mesh = init_device_mesh("cpu", {2}, {"x"});
    auto t = torch::empty({5, 4}, torch::kMeta).set_requires_grad(true);
    const auto note = c10::make_intrusive<Note>();
    t.unsafeGetTensorImpl()->set_backend_meta(note);
    CommDebugMode comms;
    distribute_in_place(t, mesh, {Shard(0)});
    auto d = DTensor(t.detach());
    EXPECT_TRUE(t.is_leaf() && t.requires_grad() && d.is_meta());
    for (const auto& p : {Shard(0), Shard(1), Replicate()}) {
      d = d.redistribute({p});
      const auto& local = detail::local_of(d);
      EXPECT_EQ(local.sizes(), c10::IntArrayRef(d.spec().local_sizes));
      EXPECT_EQ(local.unsafeGetTensorImpl()->get_backend_meta(), note.get());
    }
    EXPECT_EQ(comms.get_total_counts(), 0);
    // set_data may replace a meta tensor, distributed or plain, by one with memory.
    auto plain = torch::empty({5, 4}, torch::kMeta);
    for (auto* it : {&t, &plain}) {
      it->set_data(torch::ones({5, 4}));
      EXPECT_TRUE(it->is_cpu() && !is_dtensor(*it));
    }
  });
}

TEST(DTensor, DistributeRejectsNonLeavesPartialAndOtherPlacements) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    auto leaf = torch::ones({4}).set_requires_grad(true);
    EXPECT_CONTAINS(error_message<UsageError>([&] { distribute_tensor(leaf * 2, mesh, {Shard(0)}); }), "from_local");
    EXPECT_CONTAINS(error_message<UsageError>([&] { distribute_tensor(leaf, mesh, {Partial()}); }),
                    "Replicate or Shard");
    const auto d = distribute_tensor(leaf, mesh, {Shard(0)});
    EXPECT_CONTAINS(error_message<UsageError>([&] { distribute_tensor(d, mesh, {Replicate()}); }), "use redistribute");
    EXPECT_TRUE(distribute_tensor(d, mesh, {Shard(0)}).is_same(d));
    EXPECT_CONTAINS(error_message<UsageError>([&] { d.redistribute({Partial()}); }), "must not be Partial");
    EXPECT_CONTAINS(error_message<UsageError>([&] { distribute_tensor(leaf, mesh, {Shard(3)}); }), "3");
  });
}

TEST(DTensor, Factories) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("a=2,b=2");
    const Placements p = {Shard(0), Shard(1)};
    EXPECT_TRUE(torch::equal(zeros({5, 3}, mesh, p).full_tensor(), torch::zeros({5, 3})));
    EXPECT_TRUE(torch::equal(ones({5, 3}, mesh, p).full_tensor(), torch::ones({5, 3})));
    EXPECT_TRUE(torch::equal(full({5, 3}, 2.5, mesh, p).full_tensor(), torch::full({5, 3}, 2.5)));
    EXPECT_TRUE(torch::equal(arange(7, mesh, {Shard(0), Shard(0)}).full_tensor(), torch::arange(7)));
    EXPECT_EQ(empty({5, 3}, mesh, p).to_local().numel(),
              c10::multiply_integers(empty({5, 3}, mesh, p).spec().local_sizes));
    EXPECT_EQ(rand({4}, mesh).dtype(), torch::kFloat);
    EXPECT_TRUE(torch::equal(rand({5, 3}, mesh, p).full_tensor() < 1, torch::ones({5, 3}, torch::kBool)));
  });
}

TEST(DTensor, PrintsItsSpecAndRejectsDataAccess) {
  run_ranks(2, [](Rank& me) {
    const auto d = distribute_tensor(torch::ones({4, 3}), me.mesh("tp=2"), {Shard(0)});
    std::ostringstream out;
    out << d;
    EXPECT_CONTAINS(out.str(), "[4, 3]");
    EXPECT_CONTAINS(out.str(), "S(0)");
    EXPECT_CONTAINS(out.str(), "tp=2");
    EXPECT_CONTAINS(error_message<c10::Error>([&] { d.data_ptr(); }), "to_local()");
    EXPECT_CONTAINS(error_message<c10::Error>([&] { out << at::Tensor(d); }), "to_local()");
    EXPECT_CONTAINS(error_message<c10::Error>([&] {
                      std::ostringstream file;
                      torch::save(at::Tensor(d), file);
                    }),
                    "to_local()");
  });
}

TEST(DTensor, ParametersAreConvertedInPlaceForEveryHandle) {
  const auto weight = torch::randn({4, 6}), bias = torch::randn({4}), x = torch::randn({3, 6});
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    torch::nn::Linear plain(6, 4), net(6, 4);
    for (auto* m : {&plain, &net}) {
      (*m)->weight.set_data(weight.clone());
      (*m)->bias.set_data(bias.clone());
    }
    torch::optim::Adam adam(net->parameters(), 0.1), plain_adam(plain->parameters(), 0.1);
    auto handle = net->parameters()[0];
    distribute_in_place(net->weight, mesh, {Shard(0)});
    distribute_in_place(net->bias, mesh, {Shard(0)});
    EXPECT_TRUE(is_dtensor(handle));
    EXPECT_TRUE(handle.requires_grad() && handle.is_leaf());
    for (int step = 0; step < 3; step++) {
      adam.zero_grad(), plain_adam.zero_grad();
      (net(distribute_tensor(x, mesh)) * 1).pow(2).sum().backward();
      plain(x).pow(2).sum().backward();
      adam.step(), plain_adam.step();
    }
    EXPECT_TRUE(torch::allclose(DTensor(handle.detach()).full_tensor(), plain->weight, 1e-4, 1e-5));
    const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1.0);
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0), norm, 1e-5 * norm);

    net->to(torch::kDouble);
    EXPECT_EQ(DTensor(net->weight).to_local().dtype(), torch::kDouble);
    const auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->clone());
    EXPECT_TRUE(is_dtensor(copy->weight));
    EXPECT_EQ(DTensor(copy->weight).placements()[0], Shard(0));
    {
      torch::NoGradGuard g;
      copy->weight.zero_();
    }
    EXPECT_NE(DTensor(net->weight.detach()).full_tensor().abs().sum().item<double>(), 0);

    net->weight.set_data(DTensor(net->weight.detach()).full_tensor());  // and back
    EXPECT_FALSE(is_dtensor(net->parameters()[0]));
  });
}

TEST(DTensor, RegistersAsParameterAndBuffer) {
  struct Net : torch::nn::Module {
    Net(const at::Tensor& w, const at::Tensor& b)
        : weight(register_parameter("weight", w)), buffer(register_buffer("buffer", b)) {}
    at::Tensor weight, buffer;
  };
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    Net net(ones({4, 2}, mesh, {Shard(0)}), zeros({4}, mesh, {Shard(0)}));
    EXPECT_TRUE(net.named_parameters()["weight"].requires_grad());
    EXPECT_EQ(DTensor(net.parameters()[0]).placements()[0], Shard(0));
    EXPECT_TRUE(is_dtensor(net.named_buffers()["buffer"]));
    (net.weight * 3).sum().backward();
    EXPECT_TRUE(torch::equal(DTensor(net.parameters()[0].grad()).full_tensor(), torch::full({4, 2}, 3.)));
  });
}

TEST(DTensor, WaitsForPendingCollectiveAtFirstUse) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    const auto group = mesh.get_group();
    const auto value = torch::arange(8.);
    const auto d = distribute_tensor(value, mesh, {Shard(0)});
    auto gathered = d.redistribute({Replicate()});
    EXPECT_EQ(group->pending(), 1u);
    const auto independent = d * 2;  // runs while the all-gather is in flight
    EXPECT_EQ(group->pending(), 1u);
    const auto used = gathered + 1;
    EXPECT_EQ(group->pending(), 0u);
    EXPECT_TRUE(torch::equal(DTensor(used).to_local(), value + 1));
    // Every access from the host waits.
    EXPECT_TRUE(torch::equal(d.redistribute({Replicate()}).to_local(), value));
    EXPECT_TRUE(torch::equal(d.full_tensor(), value));
    EXPECT_EQ(at::Tensor(DTensor(d.sum()).redistribute({Replicate()})).item<double>(), 28);
    EXPECT_TRUE(at::equal(d.redistribute({Replicate()}), distribute_tensor(value, mesh)));
    EXPECT_EQ(group->pending(), 0u);
  });
}

}  // namespace
}  // namespace tessera
