#include "tessera/mesh/device_mesh.h"

#include "tessera/base/error.h"
#include "tessera/comm/collectives.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <sstream>
#include <unordered_set>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;
using Ints = std::vector<int64_t>;
using Strings = std::vector<std::string>;

template <class Call>
void says(const char* part, Call&& call) {
  EXPECT_CONTAINS(testing::error_message<UsageError>(call), part);
}

TEST(DeviceMesh, HasShapeAndCoordinate) {
  run_ranks(4, [](Rank& me) {
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    EXPECT_EQ(mesh.ndim(), 2);
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.size("tp"), 2);
    EXPECT_EQ(mesh.shape(), (Ints{2, 2}));
    EXPECT_EQ(mesh.ranks(), (Ints{0, 1, 2, 3}));
    EXPECT_TRUE(mesh.mesh().equal(at::arange(4).view({2, 2})));
    EXPECT_EQ(mesh.get_rank(), me.rank);
    EXPECT_EQ(mesh.get_coordinate(), (Ints{me.rank / 2, me.rank % 2}));
    EXPECT_EQ(mesh.get_local_rank("dp"), me.rank / 2);
    EXPECT_EQ(mesh.get_local_rank(-1), me.rank % 2);
    EXPECT_EQ(mesh.get_group("dp")->ranks(), (Ints{me.rank % 2, me.rank % 2 + 2}));
    EXPECT_EQ(mesh.get_group(1)->ranks(), (Ints{me.rank / 2 * 2, me.rank / 2 * 2 + 1}));
    EXPECT_EQ(mesh.get_group("tp")->name(), "tp");
    EXPECT_EQ(mesh.device_type(), "cpu");
  });
}

TEST(DeviceMesh, AxisGroupsRunCollectives) {
  run_ranks(6, [](Rank& me) {
    auto mesh = me.mesh("dp=3,tp=2");
    at::Tensor x = at::full({1}, static_cast<double>(me.rank));
    all_reduce(x, ReduceOp::Sum, {mesh, "dp"});  // {0 2 4} and {1 3 5}
    EXPECT_EQ(x.item<float>(), me.rank % 2 ? 9.f : 6.f);
    at::Tensor y = at::full({1}, static_cast<double>(me.rank));
    all_reduce(y, ReduceOp::Sum, mesh["tp"]);
    EXPECT_EQ(y.item<float>(), static_cast<float>(me.rank / 2 * 4 + 1));
    at::Tensor z = at::full({1}, static_cast<double>(me.rank));
    all_reduce(z, ReduceOp::Max, {mesh, 0});
    EXPECT_EQ(z.item<float>(), static_cast<float>(me.rank % 2 + 4));
  });
}

TEST(DeviceMesh, FromListsAndTensors) {
  run_ranks(4, [](Rank& me) {
    DeviceMesh nested("cpu", std::vector<Ints>{{0, 2}, {1, 3}}, {"a", "b"});
    EXPECT_EQ(nested.get_group("a")->ranks(), (me.rank < 2 ? Ints{0, 1} : Ints{2, 3}));
    EXPECT_EQ(nested.get_coordinate(), (Ints{me.rank % 2, me.rank / 2}));
    DeviceMesh tensor("cpu", at::arange(4).view({2, 2}).t(), {"a", "b"});
    EXPECT_EQ(nested, tensor);
    EXPECT_EQ(nested.state(), tensor.state()) << "equal meshes share one state";
    DeviceMesh part("cpu", Ints{3, 1});
    if (me.rank % 2 == 0) {
      EXPECT_FALSE(part.get_coordinate());
      says("is not in mesh", [&] { part.get_group(); });
      says("is not in mesh", [&] { part.get_local_rank(); });
    } else {
      EXPECT_EQ(part.get_local_rank(), me.rank == 3 ? 0 : 1);
      at::Tensor x = at::full({1}, static_cast<double>(me.rank));
      broadcast(x, 0, part);  // group rank 0 is rank 3
      EXPECT_EQ(x.item<float>(), 3.f);
    }
  });
}

TEST(DeviceMesh, SlicesContainThisRankAndShareGroups) {
  run_ranks(8, [](Rank& me) {
    auto mesh = me.mesh("pp=2,dp=2,tp=2");
    auto tp = mesh["tp"];
    EXPECT_EQ(tp.ndim(), 1);
    EXPECT_EQ(tp.ranks(), (Ints{me.rank / 2 * 2, me.rank / 2 * 2 + 1}));
    EXPECT_EQ(tp.get_group(), mesh.get_group("tp"));
    EXPECT_EQ(tp.state()->root.get(), mesh.state());
    auto both = mesh[Strings{"pp", "tp"}];
    EXPECT_EQ(both.shape(), (Ints{2, 2}));
    const int64_t dp = me.rank / 2 % 2;
    EXPECT_EQ(both.ranks(), (Ints{2 * dp, 2 * dp + 1, 2 * dp + 4, 2 * dp + 5}));
    EXPECT_EQ(both.get_coordinate(), (Ints{me.rank / 4, me.rank % 2}));
    EXPECT_EQ(both["tp"].state(), tp.state());
    EXPECT_EQ((mesh[Strings{"pp", "dp", "tp"}]).state(), mesh.state());
    says("no axis 'xp'; it has pp, dp, tp", [&] { mesh["xp"]; });
    says("own order", [&] { mesh[Strings{"tp", "pp"}]; });
    says("has no axis names", [&] { me.mesh(Ints{8})["tp"]; });
  });
}

TEST(DeviceMesh, EqualityAndHash) {
  run_ranks(4, [](Rank& me) {
    auto a = me.mesh("dp=2,tp=2"), b = me.mesh("dp=2,tp=2"), c = me.mesh("x=2,tp=2"), d = me.mesh("dp=4");
    EXPECT_EQ(a, b);
    EXPECT_EQ(a.state(), b.state());
    EXPECT_EQ(a.hash(), b.hash());
    EXPECT_FALSE(a == c);
    EXPECT_FALSE(a == d);
    EXPECT_FALSE(a == DeviceMesh());
    EXPECT_EQ(std::unordered_set<DeviceMesh>({a, b, c, d}).size(), 3u);
  });
}

TEST(DeviceMesh, OneAxisOverTheWorldReusesTheWorldGroup) {
  run_ranks(2, [](Rank& me) {
    EXPECT_EQ(me.mesh(Ints{2}).get_group(), me.group());
    auto named = me.mesh("dp=2").get_group();
    EXPECT_EQ(named->backend(), me.group()->backend());
    EXPECT_EQ(named->name(), "dp");
    const uint64_t before = me.group()->sequence();
    named->barrier().wait();
    EXPECT_EQ(me.group()->sequence(), before + 1) << "an alias counts with its group";
  });
}

TEST(DeviceMesh, JointGroupAndFlatten) {
  run_ranks(8, [](Rank& me) {
    auto mesh = me.mesh("pp=2,dp=2,tp=2");
    auto group = mesh.state()->joint_group({0, 2});
    const int64_t dp = me.rank / 2 % 2;
    EXPECT_EQ(group->ranks(), (Ints{2 * dp, 2 * dp + 1, 2 * dp + 4, 2 * dp + 5}));
    EXPECT_EQ(group->name(), "pp_tp");
    EXPECT_EQ(mesh.state()->joint_group({0, 2}), group);
    EXPECT_EQ(mesh.state()->joint_group({1}), mesh.get_group("dp"));
    auto flat = (mesh[Strings{"pp", "tp"}]).flatten();
    EXPECT_EQ(flat.shape(), Ints{4});
    EXPECT_EQ(flat.names(), Strings{"pp_tp"});
    EXPECT_EQ(flat.get_local_rank(), me.rank / 4 * 2 + me.rank % 2);
    EXPECT_EQ(flat.state()->root.get(), mesh.state());
    EXPECT_EQ(mesh.flatten("all").get_group()->name(), "all");
    at::Tensor x = at::ones({1});
    all_reduce(x, ReduceOp::Sum, flat);
    EXPECT_EQ(x.item<float>(), 4.f);
  });
}

TEST(DeviceMesh, FromGroup) {
  run_ranks(4, [](Rank& me) {
    const Ints pair{me.rank / 2 * 2, me.rank / 2 * 2 + 1}, column{me.rank % 2, me.rank % 2 + 2};
    auto row = me.world.new_group(pair, "row"), col = me.world.new_group(column, "col");
    auto mesh = DeviceMesh::from_group(row, "cpu", "tp");
    EXPECT_EQ(mesh.ranks(), pair);
    EXPECT_EQ(mesh.get_group(), row);
    auto two = DeviceMesh::from_group({col, row}, "cpu", at::arange(4).view({2, 2}), {"dp", "tp"});
    EXPECT_EQ(two.get_group("dp"), col);
    EXPECT_EQ(two, me.mesh("dp=2,tp=2"));
    says("the given group has", [&] { DeviceMesh::from_group({row, col}, "cpu", at::arange(4).view({2, 2})); });
    says("one group per axis", [&] { DeviceMesh::from_group({row}, "cpu", at::arange(4).view({2, 2})); });
  });
}

TEST(DeviceMesh, CurrentMeshScope) {
  run_ranks(2, [](Rank& me) {
    says("has no current mesh", [] { DeviceMesh::current(); });
    MeshScope outer(me.mesh("dp=2"));
    {
      MeshScope inner(me.mesh("tp=2"));
      EXPECT_EQ(DeviceMesh::current().names(), Strings{"tp"});
    }
    EXPECT_EQ(DeviceMesh::current().names(), Strings{"dp"});
  });
}

TEST(DeviceMesh, ErrorsNameTheCause) {
  run_ranks(2, [](Rank& me) {
    says("'cuda:0' has an index", [&] { init_device_mesh("cuda:0", {2}); });
    says("needs 4 ranks; the world has 2", [&] { init_device_mesh("cpu", {2, 2}); });
    says("'dp' is given twice", [&] { init_device_mesh("cpu", {1, 2}, {"dp", "dp"}); });
    says("2 axes but 1 names", [&] { init_device_mesh("cpu", {1, 2}, {"dp"}); });
    says("at least one axis", [&] { init_device_mesh("cpu", Ints{}); });
    says("every axis needs", [&] { init_device_mesh("cpu", {0}); });
    says("contains rank 7", [&] { DeviceMesh("cpu", Ints{7}); });
    says("twice", [&] { DeviceMesh("cpu", Ints{1, 1}); });
    says("equal length", [&] { DeviceMesh("cpu", std::vector<Ints>{{0, 1}, {1}}); });
    says("integer CPU tensor", [&] { DeviceMesh("cpu", at::ones({2})); });
    auto mesh = me.mesh("dp=1,tp=2");
    says("name one of its 2 axes", [&] { mesh.get_group(); });
    says("name one of its 2 axes", [&] { mesh.get_local_rank(); });
    says("has 2 axes; axis 2", [&] { mesh.size(2); });
    says("no axis 'pp'", [&] { mesh.size("pp"); });
  });
}

struct Cache : detail::MeshAttachment {
  explicit Cache(bool* cleared) : cleared_(cleared) {}
  void clear() override { *cleared_ = true; }
  bool* cleared_;
};

TEST(DeviceMesh, DestroyedWorldClearsAttachmentsOfItsMeshes) {
  bool cleared = false;
  DeviceMesh kept;
  run_ranks(1, [&](Rank& me) {
    kept = me.mesh("dp=1");
    kept.state()->attachments[0] = std::make_unique<Cache>(&cleared);
  });
  EXPECT_TRUE(cleared);
  EXPECT_EQ(kept.size(), 1);
  says("destroyed", [&] { init_device_mesh(kept.state()->world, "cpu", {1}, {"new"}); });
}

TEST(MeshShape, ParsesWhatItPrints) {
  for (const char* text : {"dp=2,tp=4", "2x4", "8", "a=1"}) {
    std::ostringstream out;
    out << parse_mesh_shape(text);
    EXPECT_EQ(out.str(), text);
  }
  EXPECT_EQ(parse_mesh_shape("dp=2,tp=4"), (MeshShape{{2, 4}, {"dp", "tp"}}));
  for (const char* text : {"", "dp", "dp=", "dp=0", "=2", "dp=2,4", "2x", "dp=2,dp=2", "dp=-1", "dp=2 "})
    says("mesh '", [&] { parse_mesh_shape(text); });
}

TEST(DeviceMesh, DifferentMeshesOnRanksThrow) {
  std::string report;
  try {
    run_ranks(2, [](Rank& me) { me.mesh({2}, {me.rank == 0 ? "dp" : "tp"}); });
  } catch (const std::exception& error) {
    report = error.what();
  }
  EXPECT_CONTAINS(report, "1 of 2 ranks failed");  // only the rank that makes its mesh second
  EXPECT_CONTAINS(report, "makes its mesh number 1 of all ranks with shape 2, names '");
  EXPECT_CONTAINS(report, "names 'dp', ranks 0,1");
  EXPECT_CONTAINS(report, "names 'tp', ranks 0,1");
}

}  // namespace
}  // namespace tessera
