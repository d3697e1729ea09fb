// The examples of the API reference: comm, mesh, placement, dtensor, debug.
#include "tessera/rules/detail/elementwise.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/library.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cmath>
#include <iostream>

namespace tessera::docs_comm {
namespace {

namespace ts = tessera;
using ts::testing::Rank;
using ts::testing::run_ranks;

TEST(ApiComm, World) {
  run_ranks(4, [](Rank& me) {
    // example: tessera/comm/world.h
    const ts::World world = ts::World::current();
    if (world.rank() % 2 == 0) {
      ts::comm::Group evens = world.new_group({0, 2});  // called by ranks 0 and 2
      EXPECT_EQ(ts::get_rank(evens), world.rank() / 2);
      EXPECT_EQ(ts::get_world_size(evens), 2);
    }
    const ts::RandomState random = world.random();  // seed and offset of ts::manual_seed and the random ops
    // end
    EXPECT_EQ(random.offset, 0);
  });
}

void one_rank() {
  // example: tessera/comm/world.h
  ts::World world = ts::init();
  ts::destroy();
  // end
}

TEST(ApiComm, Init) {
  // example: tessera/comm/world.h
  const ts::InitOptions options{.backend = "gloo", .timeout = std::chrono::seconds(30)};
  ts::init(options);  // without a launcher the world has one rank
  ts::destroy();
  // end
  one_rank();
}

TEST(ApiComm, Collectives) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=1");
    auto grad = torch::ones({2}), x = torch::full({2}, me.rank + 1.0);
    const auto loss = torch::ones({});
    double validation_loss = 0.5;
    torch::optim::SGD optimizer(std::vector<at::Tensor>{torch::ones({1}, torch::requires_grad())}, 0.1);
    torch::optim::ReduceLROnPlateauScheduler scheduler(optimizer);
    // example: tessera/comm/collectives.h
    all_reduce(grad, ReduceOp::Sum, {mesh, "dp"});
    auto work = all_reduce(x, ReduceOp::Max, {}, /*async_op=*/true);
    work.wait();
    ts::all_reduce_coalesced({grad, x});  // several tensors, one collective
    // end
    EXPECT_EQ(x[0].item<double>(), 4);
    // example: tessera/comm/collectives.h

    const auto mine = torch::full({1}, me.rank);
    at::Tensor all = torch::empty({2}, torch::kLong), first = torch::empty({1}, torch::kLong),
               sum = torch::empty({1}, torch::kLong);
    std::vector<at::Tensor> parts{torch::empty_like(mine), torch::empty_like(mine)};
    ts::all_gather(parts, mine);
    ts::all_gather_into_tensor(all, mine);  // 0, 1
    ts::reduce_scatter_tensor(sum, all);    // rank r has the sum of element r of all ranks
    ts::reduce_scatter(sum, {mine, mine});  // the same with a list
    ts::broadcast(all, /*source=*/0);
    ts::scatter(first, me.rank == 0 ? parts : std::vector<at::Tensor>{}, /*source=*/0);
    ts::gather(me.rank == 0 ? parts : std::vector<at::Tensor>{}, mine, /*target=*/0);
    ts::reduce(sum, /*target=*/1);
    ts::all_to_all_single(all, all.clone());  // element r goes to rank r
    ts::all_to_all(parts, {mine, mine});
    ts::barrier();
    // end
    EXPECT_EQ(first.item<int64_t>(), me.rank);
    // example: tessera/comm/collectives.h

    at::Tensor received = torch::empty({1}, torch::kLong);
    const int64_t peer = 1 - me.rank;
    ts::comm::Work sending = ts::isend(mine, peer), receiving = ts::irecv(received, peer);
    sending.wait(), receiving.wait();
    if (me.rank == 0) ts::send(mine, 1);
    if (me.rank == 1) ts::recv(received, 0);
    // end
    EXPECT_EQ(received.item<int64_t>(), peer);
    // example: tessera/comm/collectives.h

    const ts::GroupRef over_dp{mesh, "dp"};  // what every collective takes as its group
    const auto my_c10d_process_group = over_dp->process_group();
    const ts::comm::Group same = ts::group_from(my_c10d_process_group);
    const auto options = ts::DDPOptions{.process_group = my_c10d_process_group};
    for (int step = 0; step < 2; step++) {
      if (any_rank(std::isnan(loss.item<double>()))) break;
      if (ts::all_ranks(step == 1)) break;
      scheduler.step(mean_over_ranks(validation_loss));  // ReduceLROnPlateau
    }
    // end
    EXPECT_EQ(same->size(), 2);
  });
}

TEST(ApiComm, Functional) {
  run_ranks(2, [](Rank& me) {
    const auto& group = me.group();
    // example: tessera/comm/functional_collectives.h
    const auto x = torch::ones({2, 3});
    const auto sum = ts::funcol::all_reduce(x, ts::ReduceOp::Sum, group);
    const auto rows = ts::funcol::all_gather(x, /*dim=*/0, /*sizes=*/{2, 2}, group);  // 4 x 3
    const auto part = ts::funcol::reduce_scatter(rows, /*dim=*/0, /*sizes=*/{2, 2}, ts::ReduceOp::Sum, group);
    const auto columns = ts::funcol::all_to_all(rows, /*split_dim=*/0, {2, 2}, /*cat_dim=*/1, {3, 3}, group);  // 2 x 6
    const auto same = ts::funcol::broadcast(x, /*source=*/0, group);
    const auto both = ts::funcol::all_reduce_coalesced({x, rows}, ts::ReduceOp::Sum, group);  // one collective
    const auto gathered = ts::funcol::all_gather_coalesced({x, x}, {0, 0}, {2, 2, 2, 2}, group);
    const auto scattered =
        ts::funcol::reduce_scatter_coalesced({rows, rows}, {0, 0}, {2, 2, 2, 2}, ts::ReduceOp::Sum, group);
    ts::funcol::wait(sum, group);  // before its memory is read
    const auto value = sum + 1;
    // end
    EXPECT_EQ(value[0][0].item<double>(), 3);
    EXPECT_EQ(columns.sizes(), c10::IntArrayRef({2, 6}));
    EXPECT_EQ(part.size(0), 2);
  });
}

TEST(ApiComm, Communicator) {
  run_ranks(2, [](Rank& me) {
    auto x = torch::ones({2});
    // example: tessera/comm/communicator.h
    ts::comm::Group group = ts::World::current().new_group({0, 1}, "pair");
    group->all_reduce(x, ts::ReduceOp::Sum).wait();
    const ts::comm::PostOptions named{.tensor_name = "gradients"};  // shown in errors
    group->all_reduce(x, ts::ReduceOp::Sum, named).wait();
    ts::comm::Communicator& communicator = *group;
    std::cout << communicator.name() << " over " << communicator.backend_name() << "\n";
    // end
    EXPECT_EQ(x[0].item<double>(), 4);
    // example: tessera/comm/work.h
    ts::comm::Work work = group->all_reduce(x, ts::ReduceOp::Sum, {.family = ts::comm::Family::C10d});
    work.then([] { std::cout << "arrived\n"; });  // runs in the first wait()
    if (!work.done()) work.wait();
    ts::CommDebugMode mode;
    ts::barrier();
    EXPECT_EQ(mode.get_comm_counts().of(ts::comm::CommKind::AllReduce), 0);
    // end
  });
}

TEST(ApiComm, Backends) {
  // example: tessera/comm/backends.h
  for (const ts::comm::BackendInfo& info : ts::comm::backends())
    std::cout << info.name << (info.available() ? "" : " (not available)") << ": " << info.help << "\n";
  ts::comm::check_backend("gloo");  // UsageError with the list of names for another one

  const ts::comm::Connect connect = [](const ts::comm::ConnectOptions& options) {
    return ts::comm::connect("gloo", options);  // or a c10d::Backend of yours
  };
  ts::comm::register_backend("mine", connect, "gloo under another name");
  ts::comm::ConnectOptions alone{.store = c10::make_intrusive<c10d::HashStore>(),
                                 .group = "alone",
                                 .ranks = {0},
                                 .timeout = std::chrono::seconds(5)};
  const auto backend = ts::comm::connect_checked("mine", alone);  // compares collectives between ranks
  alone.store = c10::make_intrusive<c10d::HashStore>();
  const auto both = ts::comm::connect_both("gloo", "gloo", alone);  // for CPU tensors, for others
  // end
  EXPECT_EQ(backend->getSize(), 1);
  EXPECT_EQ(both->getSize(), 1);
}

TEST(ApiComm, Environment) {
  // example: tessera/comm/environment.h
  const ts::comm::Variables variables = [](const char* name) -> std::string {
    const std::map<std::string, std::string> set{
        {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "head"}, {"MASTER_PORT", "29500"}};
    return set.count(name) ? set.at(name) : "";
  };
  const ts::comm::Environment environment =
      ts::comm::read_environment(variables);  // without an argument: of this process
  std::cout << environment << "\n";
  // end
  EXPECT_EQ(environment.rank, 1);
}

TEST(ApiMesh, DeviceMesh) {
  run_ranks(8, [](Rank&) {
    // example: tessera/mesh/device_mesh.h
    auto mesh = init_device_mesh("cpu", {2, 4}, {"dp", "tp"});
    EXPECT_TRUE(mesh["tp"].size() == 4);
    const ts::MeshShape shape = ts::parse_mesh_shape("dp=2,tp=4");
    if (mesh.get_rank() == 0) std::cout << mesh << " is " << shape << "\n";
    const ts::MeshScope scope(mesh["tp"]);  // functions without a mesh argument use it
    // end
    EXPECT_EQ(shape.names, mesh.names());
  });
}

TEST(ApiPlacement, Placement) {
  const auto check = [](bool holds) { EXPECT_TRUE(holds); };
  // example: tessera/placement/placement.h
  Placements p = {Replicate(), Shard(0)};
  check(to_string(p) == "[R, S(0)]");
  const ts::Placement shard = ts::parse_placement("S(1)");
  const ts::Placements parsed = ts::parse_placements("[S(-1), R]");
  const ts::PlacementsRef view = parsed;
  const ts::Placements counted = ts::normalize(view, /*ndim=*/2);  // [S(1), R]
  const ts::Placements others = {ts::StridedShard(0, 2), ts::Partial(), ts::NormPartial(2), ts::MaskPartial()};
  std::cout << shard << " " << ts::to_string(others) << "\n";
  // end
  EXPECT_EQ(counted[0], shard);
}

TEST(ApiDTensor, DTensor) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    const auto weight = torch::ones({4, 6});
    const at::Tensor x = ts::ones({3, 6}, mesh);
    // example: tessera/dtensor/dtensor.h
    auto w = distribute_tensor(weight, mesh, {Replicate(), Shard(0)});
    at::Tensor y = torch::mm(x, w.t());  // stays distributed
    at::Tensor plain = DTensor(y).full_tensor();
    if (me.rank == 0) std::cout << ts::DTensor(y) << "\n";  // dtype, sizes, placements, local tensor

    const ts::FromLocalOptions uneven{.shape = {{3, 6}}, .stride = {{6, 1}}};  // ranks have 2 rows and 1 row
    const auto rows = torch::ones({me.rank < 2 ? 2 : 1, 6});
    auto z = ts::DTensor::from_local(rows, mesh, {ts::Shard(0), ts::Replicate()}, uneven);
    const ts::DistributeOptions own{.src_data_rank = std::nullopt};  // each rank slices its own values
    auto v = ts::distribute_tensor(weight, mesh, {ts::Shard(0), ts::Shard(1)}, own);
    auto random = ts::rand({4, 4}, mesh, {ts::Shard(0), ts::Replicate()});
    auto units = ts::ones({4, 4}, mesh);
    auto numbers = ts::arange(8, mesh, {ts::Shard(0), ts::Replicate()});
    // end
    EXPECT_EQ(plain[0][0].item<double>(), 6);
    EXPECT_EQ(z.size(0), 3);
  });
}

TEST(ApiDTensor, LocalMap) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const at::Tensor x = ts::ones({4, 4}, mesh, {ts::Shard(1)}), w = ts::ones({4, 4}, mesh, {ts::Shard(0)});
    // example: tessera/dtensor/local_map.h
    auto mm = local_map([](at::Tensor a, at::Tensor b) { return torch::mm(a, b); }, {Placements{Partial()}},
                        {Placements{Shard(1)}, Placements{Shard(0)}});
    at::Tensor y = mm(x, w);

    const ts::MaybePlacements plain = std::nullopt;  // of an argument that is not a DTensor
    const ts::LocalMapOptions options{.redistribute_inputs = true};
    auto scaled = ts::local_map([](at::Tensor a, double factor) { return a * factor; }, {ts::Placements{ts::Shard(0)}},
                                {ts::Placements{ts::Shard(0)}, plain}, options);
    at::Tensor z = scaled(x, 2.0);
    // end
    EXPECT_EQ(ts::DTensor(y).full_tensor()[0][0].item<double>(), 4);
    EXPECT_EQ(ts::DTensor(z).full_tensor()[0][0].item<double>(), 2);
  });
}

TEST(ApiDTensor, Policy) {
  run_ranks(2, [](Rank& me) {
    const at::Tensor x = ts::ones({4, 4}, me.mesh("tp=2"), {ts::Shard(0)});
    // example: tessera/dtensor/policy.h
    {
      const ts::CommPolicyScope strict(ts::CommPolicy::Error);  // a redistribution that nobody asked for is an error
      EXPECT_EQ(ts::comm_policy(), ts::CommPolicy::Error);
    }
    const ts::ImplicitReplication scope;  // plain tensors count as replicated
    at::Tensor y = x + torch::ones({4, 4});
    // end
    EXPECT_TRUE(ts::is_dtensor(y));
  });
}

TEST(ApiDTensor, Random) {
  run_ranks(2, [](Rank& me) {
    // example: tessera/dtensor/random.h
    ts::manual_seed(7);
    at::Tensor plain = torch::empty({4, 4});
    EXPECT_EQ(ts::random::state().seed, 7);
    ts::random::normal_(plain, 0, 0.02);  // the bits that a DTensor gets on any mesh
    ts::random::uniform_(plain, -1, 1);
    ts::random::bernoulli_(plain, 0.5);
    const auto noise = ts::random::rand({4});
    const auto dropped = ts::random::dropout(plain, 0.1, /*train=*/true);
    {
      const ts::random::SeedScope scope(11);  // another seed while it is alive
      ts::random::normal_(plain);
    }
    // end
    EXPECT_EQ(noise.size(0), 4);
  });
}

at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& factors) { return x * factors.unsqueeze(1); }
// tests/docs/concepts_test.cpp defines the op.
TORCH_LIBRARY_IMPL(my, CompositeExplicitAutograd, library) { library.impl("scale_rows", scale_rows); }

TEST(ApiDTensor, Register) {
  // example: tessera/dtensor/register.h
  register_sharding("my::scale_rows", {
                                          {{Replicate(), Replicate()}, {Replicate()}},
                                          {{Shard(0), Shard(0)}, {Shard(0)}},
                                      });
  // end
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const at::Tensor x = ts::ones({4, 2}, mesh, {ts::Shard(0)}), factors = ts::ones({4}, mesh, {ts::Shard(0)});
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("my::scale_rows", "");
    const at::Tensor y = op.typed<at::Tensor(const at::Tensor&, const at::Tensor&)>().call(x, factors);
    EXPECT_EQ(ts::DTensor(y).placements()[0], ts::Placement(ts::Shard(0)));
  });
  // example: tessera/dtensor/register.h
  const ts::ShardingOptions options{.reads_scalars = true};  // the strategies depend on a number
  const auto rule = [](const ts::rules::OpQuery& query) { return ts::rules::elementwise(query); };
  ts::register_sharding("my::swish", rule, options);
  ts::same_as("my::scale_rows_too", "my::scale_rows");
  // end
}

TEST(ApiDebug, CommDebugMode) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const at::Tensor x = ts::ones({4, 4}, mesh, {ts::Shard(1)}), w = ts::ones({4, 4}, mesh, {ts::Shard(0)});
    // example: tessera/debug/comm_debug_mode.h
    CommDebugMode mode;
    auto y = DTensor(torch::mm(x, w)).redistribute({Replicate()});
    EXPECT_EQ(mode.get_comm_counts().of(comm::CommKind::AllReduce), 1);
    std::cout << mode.debug_string();
    // end
  });
}

}  // namespace
}  // namespace tessera::docs_comm
