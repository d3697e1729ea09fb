// A checkpoint of one mesh loads on another, bitwise equal; and the errors.
#include "tessera/checkpoint/save.h"

#include "new_folder.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/background_removal.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <map>

namespace tessera::dcp {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;
namespace fs = std::filesystem;

// A global tensor and its placements on meshes of one and of two axes.
struct TensorCase {
  const char* name;
  at::Tensor value;
  Placements line, grid;
};

std::vector<TensorCase> tensor_cases() {
  const auto numbers = [](at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return at::arange(c10::multiply_integers(sizes), at::kFloat).sin().mul(100).to(dtype).view(sizes);
  };
  const auto r = Replicate();
  return {
      {"even", numbers({8, 4}), {Shard(0)}, {Shard(0), Shard(1)}},
      {"uneven", numbers({7, 5}), {Shard(0)}, {Shard(1), Shard(0)}},
      {"twice", numbers({9, 2}), {Shard(1)}, {Shard(0), Shard(0)}},
      {"strided", numbers({11, 3}), {StridedShard(0, 2)}, {StridedShard(0, 2), Shard(0)}},
      {"blocks", numbers({12}), {Shard(0, 4)}, {Shard(0, 3), r}},
      {"fewer than ranks", numbers({2, 3}), {Shard(0)}, {Shard(0), Shard(0)}},
      {"replicated", numbers({3, 3}), {r}, {r, r}},
      {"half replicated", numbers({6, 3}), {Shard(0)}, {r, Shard(0)}},
      {"bf16", numbers({5, 3}, at::kBFloat16), {Shard(0)}, {Shard(1), r}},
      {"long", numbers({5}, at::kLong), {Shard(0)}, {r, Shard(0)}},
      {"bool", numbers({5, 2}).gt(0), {Shard(1)}, {Shard(0), Shard(1)}},
      {"scalar", at::scalar_tensor(2.5, at::kDouble), {r}, {r, r}},
      {"empty", at::empty({0, 3}), {Shard(0)}, {Shard(1), r}},
      {"plain", numbers({4}), {}, {}},
  };
}

at::Tensor distribute(const TensorCase& each, const at::Tensor& value, const DeviceMesh& mesh) {
  if (each.line.empty()) return value.clone();
  return distribute_tensor(value.clone(), mesh, mesh.ndim() == 1 ? each.line : each.grid, {.src_data_rank = {}});
}

StateDict dict_on(const DeviceMesh& mesh, bool filled) {
  StateDict dict;
  for (const auto& each : tensor_cases())
    dict.insert(each.name, distribute(each, filled ? each.value : at::zeros_like(each.value), mesh));
  return dict;
}

at::Tensor local(const at::Tensor& t) { return is_dtensor(t) ? DTensor(t).to_local() : t; }

void expect_same(const StateDict& found, const StateDict& wanted) {
  for (const auto& [name, tensor] : wanted) EXPECT_TRUE(local(found.at(name)).equal(local(tensor))) << name;
}

const std::vector<std::vector<int64_t>> kMeshes{{1}, {2}, {3}, {4}, {2, 2}, {1, 3}};

int64_t ranks_of(const std::vector<int64_t>& mesh) { return c10::multiply_integers(mesh); }

TEST(Checkpoint, AnyMeshLoadsACheckpointOfAnyMesh) {
  const NewFolder folder;
  for (const auto& from : kMeshes) {
    const auto path = folder / c10::str("from", from);
    run_ranks(ranks_of(from), [&](Rank& me) {
      save(dict_on(me.mesh(from), true), path, {{"step", 7}, {"text", "x"}}, {.sync = false});
    });
    for (const auto& to : kMeshes)
      run_ranks(ranks_of(to), [&](Rank& me) {
        const auto mesh = me.mesh(to);
        const auto dict = dict_on(mesh, false);
        const auto report = load(dict, path);
        EXPECT_TRUE(report.empty()) << report;
        expect_same(dict, dict_on(mesh, true));
        EXPECT_EQ(read_values(path), (Values{{"step", 7}, {"text", "x"}}));
      });
  }
}

// The files have as many bytes as the tensors.
TEST(Checkpoint, EachElementIsWrittenOnce) {
  const NewFolder folder;
  int64_t bytes = 0;
  for (const auto& each : tensor_cases()) bytes += static_cast<int64_t>(each.value.nbytes());
  for (const auto& mesh : kMeshes) {
    const auto path = folder / c10::str("x", mesh);
    run_ranks(ranks_of(mesh), [&](Rank& me) { save(dict_on(me.mesh(mesh), true), path); });
    int64_t found = 0;
    for (const auto& file : fs::directory_iterator(path))
      if (file.path().extension() == ".safetensors") {
        const SafetensorsFile opened(file.path().string());
        for (const auto& entry : opened.header().tensors) found += static_cast<int64_t>(entry.end - entry.begin);
      }
    EXPECT_EQ(found, bytes) << mesh;
    EXPECT_FALSE(fs::exists(partial_folder(path)));
  }
}

// A tensor on the submesh of one axis is replicated over the other axis, but its spec does not show this.
TEST(Checkpoint, ReplicasOnASubmeshAreWrittenOnce) {
  const NewFolder folder;
  run_ranks(4, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    const auto value = at::arange(12, at::kFloat).view({6, 2});
    const auto on_tp = distribute_tensor(value, mesh["tp"], {Shard(0)}, {.src_data_rank = {}});
    save({{"w", on_tp}, {"b", value.clone()}}, folder / "x");
    const auto manifest = open_source(folder / "x").manifest;
    EXPECT_EQ(manifest.find("w")->shards.size(), 2u);
    EXPECT_EQ(manifest.find("b")->shards.size(), 1u);
    const auto other = zeros({6, 2}, mesh["dp"], {Shard(1)});
    load({{"w", other}, {"b", zeros({6, 2}, mesh, {Shard(0), Shard(1)})}}, folder / "x");
    EXPECT_TRUE(other.to_local().equal(value.narrow(1, me.rank / 2, 1)));
  });
}

TEST(Checkpoint, TargetsKeepTheirDtypeAndStrides) {
  const NewFolder folder;
  run_ranks(1, [&](Rank&) {
    const auto value = at::arange(6, at::kFloat).view({2, 3});
    save({{"w", value}}, folder / "x");
    const auto half = at::zeros({2, 3}, at::kHalf), transposed = at::zeros({3, 2}).t();
    const auto parameter = at::zeros({2, 3}).requires_grad_();
    load({{"w", half}}, folder / "x");
    load({{"w", transposed}}, folder / "x");
    load({{"w", parameter}}, folder / "x");
    EXPECT_TRUE(half.equal(value.to(at::kHalf)));
    EXPECT_TRUE(transposed.equal(value));
    EXPECT_TRUE(parameter.equal(value));
  });
}

TEST(Checkpoint, MismatchesAreOneErrorAndChangeNothing) {
  const NewFolder folder;
  run_ranks(2, [&](Rank& me) {
    const auto one = at::ones({4});
    save({{"layer.weight", at::ones({4, 2})}, {"layer.bias", one}, {"old", one}}, folder / "x");
    const auto bias = at::zeros({4});
    const StateDict dict{{"layer.wieght", at::zeros({4, 2})}, {"layer.bias", bias}, {"old", at::zeros({5})}};
    const auto message = error_message<UsageError>([&] { load(dict, folder / "x"); });
    for (const std::string part :
         {"loading '", "the checkpoint does not fit; nothing was loaded.",
          "missing from the checkpoint: layer.wieght; did you mean 'layer.weight'",
          "only in the checkpoint: layer.weight", "wrong shape: old is [5] here and [4] in the checkpoint",
          "Pass {.strict = false} to load what fits."})
      EXPECT_CONTAINS(message, part);
    EXPECT_EQ(message.find("rank"), std::string::npos) << "all ranks found the same: " << message;
    EXPECT_TRUE(bias.equal(at::zeros({4})));
    const auto report = load(dict, folder / "x", {.strict = false});
    EXPECT_EQ(report, (LoadReport{{"layer.wieght"}, {"layer.weight"}, {{"old", {5}, {4}}}}));
    EXPECT_TRUE(bias.equal(one));
    // A mismatch on one rank: no rank loads.
    const auto first = at::zeros({4});
    const StateDict differs = me.rank == 0 ? StateDict{{"bias", first}} : StateDict{{"bios", first}};
    EXPECT_ERROR(UsageError, load(differs, folder / "x", {.prefix = "layer."}), "rank 0: the checkpoint does not fit");
    EXPECT_TRUE(first.equal(at::zeros({4})));
  });
}

TEST(Checkpoint, PrefixLoadsAPartOfACheckpoint) {
  const NewFolder folder;
  run_ranks(2, [&](Rank&) {
    save({{"model.w", at::ones({2})}, {"optimizer.w", at::full({2}, 2.0)}}, folder / "x");
    const auto w = at::zeros({2});
    EXPECT_TRUE(load({{"w", w}}, folder / "x", {.prefix = "optimizer."}).empty());
    EXPECT_TRUE(w.equal(at::full({2}, 2.0)));
  });
}

TEST(Checkpoint, OnlyNeededFilesAreRead) {
  const NewFolder folder;
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    save({{"w", distribute_tensor(at::arange(4, at::kFloat), mesh, {Shard(0)}, {.src_data_rank = {}})}}, folder / "x");
  });
  fs::remove(folder / "x/shard-00002-model-00001-of-00001.safetensors");
  run_ranks(4, [&](Rank& me) {
    // Ranks 0 and 1 need the first half only.
    const DeviceMesh mesh("cpu", std::vector<int64_t>{0, 1, 2, 3}, {"dp"});
    const auto w = zeros({4}, mesh, {Shard(0)});
    const auto message = error_message<UsageError>([&] { load({{"w", w}}, folder / "x"); });
    EXPECT_CONTAINS(message, "ranks 2, 3: cannot read the tensors '");
    EXPECT_CONTAINS(message, "shard-00002-model-00001-of-00001.safetensors': No such file");
    EXPECT_TRUE(w.to_local().equal(at::zeros({1})));
    (void)me;
  });
}

TEST(Checkpoint, DamageIsDetected) {
  const NewFolder folder;
  const auto load_error = [&](const StateDict& dict, LoadOptions options) {
    std::string message;
    run_ranks(1, [&](Rank&) { message = error_message<UsageError>([&] { load(dict, folder / "x", options); }); });
    return message;
  };
  run_ranks(1, [&](Rank&) { save({{"w", at::ones({4})}, {"b", at::ones({2})}}, folder / "x"); });
  const auto file = folder / "x/shard-00001-model-00001-of-00001.safetensors";
  const auto good = read(file);
  const auto w = at::zeros({4}), b = at::zeros({2});
  auto bad = good;
  bad[good.size() - 1] ^= 1;
  write(file, bad);
  EXPECT_CONTAINS(load_error({{"w", w}, {"b", b}}, {}), "the bytes of 'b' [0:2] are damaged: their checksum is");
  EXPECT_TRUE(w.equal(at::zeros({4})));
  EXPECT_CONTAINS(load_error({{"w", w}, {"b", b}}, {.verify = false}), "nothing was thrown");
  write(file, good.substr(0, good.size() - 1));
  EXPECT_CONTAINS(load_error({{"w", w}, {"b", b}}, {}),
                  "the tensors have 24 bytes, and 23 are in the file: it is truncated");
  fs::remove(file);
  write_safetensors(file, {{"w", at::ones({4})}, {"b", at::ones({3})}});
  EXPECT_CONTAINS(load_error({{"w", w}, {"b", b}}, {}),
                  "'b' [0:2] of dtype Float was saved in this file, and Float[3] is there now");
  write(folder / "x/tessera.json", "{");
  EXPECT_CONTAINS(load_error({{"w", w}, {"b", b}}, {}), "tessera.json");
}

TEST(Checkpoint, ErrorsOfSave) {
  const NewFolder folder;
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    const auto partial = DTensor::from_local(at::ones({2}), mesh, {Partial()});
    EXPECT_ERROR(UsageError, save({{"w", partial}}, folder / "x"), "saving '", "'w' is f32[2][P(sum)] on mesh(dp=2)",
                 "redistribute it first");
    EXPECT_ERROR(UsageError, save({{"w", at::ones({2}, at::kComplexFloat)}}, folder / "x"),
                 "'w' is of dtype ComplexFloat, which safetensors does not support");
    EXPECT_ERROR(UsageError, save({{"w", at::ones({2}, at::kMeta)}}, folder / "x"), "'w' [2] is on the meta device");
    EXPECT_ERROR(UsageError, save({{"w", at::ones({2 + me.rank})}}, folder / "x"),
                 "'w' is Float[2] on rank 0 and Float[3] on rank 1");
    EXPECT_ERROR(UsageError, save({{"w", at::ones({2})}}, "/dev/null/x"),
                 "cannot create the folder '/dev/null/x.partial'");
    EXPECT_ERROR(UsageError, save({}, folder / "x", {{"a", std::nan("")}}), "nan");
  });
  EXPECT_FALSE(fs::exists(folder / "x"));
  EXPECT_FALSE(fs::exists(folder / "x.partial"));
}

TEST(Checkpoint, ExistingCheckpointIsReplacedOnlyWithOverwrite) {
  const NewFolder folder;
  run_ranks(2, [&](Rank&) {
    const auto w = at::zeros({2});
    save({{"w", at::ones({2})}}, folder / "x");
    EXPECT_ERROR(UsageError, save({{"w", at::full({2}, 2.0)}}, folder / "x"), "already exists");
    load({{"w", w}}, folder / "x");
    EXPECT_TRUE(w.equal(at::ones({2})));
    save({{"w", at::full({2}, 2.0)}}, folder / "x/", {}, {.overwrite = true});
    load({{"w", w}}, folder / "x");
    EXPECT_TRUE(w.equal(at::full({2}, 2.0)));
  });
  remove_left_folders();
  EXPECT_FALSE(fs::exists(folder / "x.partial"));
}

// A limit on file sizes simulates a full disk: the same call fails in the same way.
TEST(Checkpoint, FullDiskIsAnErrorOnAllRanksAndOldCheckpointsStay) {
  const NewFolder folder;
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    const auto w = zeros({3000}, mesh, {Shard(0)});
    save({{"w", w}}, step_folder(folder.path(), 1));
    if (me.rank == 0) {
      const rlimit small{4096, before.rlim_max};
      setrlimit(RLIMIT_FSIZE, &small);
    }
    me.group()->barrier().wait();
    const auto message = error_message<SystemError>([&] { save({{"w", w}}, step_folder(folder.path(), 2)); });
    EXPECT_CONTAINS(message, "saving '");
    EXPECT_CONTAINS(message, "rank 0: cannot write '");
    EXPECT_CONTAINS(message, "rank 1: cannot write '");
    EXPECT_CONTAINS(message, "step-2.partial/shard-00001-model-00001-of-00001.safetensors': File too large");
    me.group()->barrier().wait();
    if (me.rank == 0) setrlimit(RLIMIT_FSIZE, &before);
    me.group()->barrier().wait();
    EXPECT_EQ(latest(folder.path()), folder / "step-1");
    load({{"w", w}}, folder / "step-1");
    EXPECT_FALSE(fs::exists(folder / "step-2.partial"));
  });
}

TEST(Folders, LatestAndKeepLatest) {
  const NewFolder folder;
  EXPECT_EQ(latest(folder.path()), std::nullopt);
  EXPECT_EQ(latest(folder / "nowhere"), std::nullopt);
  for (const std::string name : {"step-x", "step-", "step-99.partial", "step--1", "other"})
    fs::create_directory(folder / name);
  fs::create_directory(folder / "step-77");  // incomplete: has no manifest
  run_ranks(2, [&](Rank&) {
    for (const int64_t step : {9, 10, 100, 8}) save({{"w", at::ones({2})}}, step_folder(folder.path(), step));
  });
  EXPECT_FALSE(fs::exists(folder / "step-99.partial")) << "save() removes what a crash left";
  EXPECT_EQ(latest(folder.path()), folder / "step-100");
  std::vector<int64_t> steps;
  for (const auto& [step, path] : steps_in(folder.path())) steps.push_back(step);
  EXPECT_EQ(steps, (std::vector<int64_t>{8, 9, 10, 100}));
  run_ranks(2, [&](Rank&) { save({{"w", at::ones({2})}}, step_folder(folder.path(), 101), {}, {.keep_latest = 2}); });
  steps.clear();
  for (const auto& [step, path] : steps_in(folder.path())) steps.push_back(step);
  EXPECT_EQ(steps, (std::vector<int64_t>{100, 101}));
  wait_for_removals();
  remove_left_folders();
  for (const auto& entry : fs::directory_iterator(folder.path())) EXPECT_NE(entry.path().extension(), ".partial");
  EXPECT_TRUE(fs::exists(folder / "other"));
  EXPECT_ERROR(UsageError, keep_latest(folder.path(), 0), "keep_latest(0) would keep nothing");
}

}  // namespace
}  // namespace tessera::dcp
