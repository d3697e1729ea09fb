#include "tessera/data_parallel/fsdp/state_dict.h"

#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/data_parallel.h"
#include "tests/fixtures/full_tensor.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;

// A way to distribute the same model.
struct Way {
  const char* name;
  enum Kind { Plain, Flat, FlatOrigParams, PerParameter } kind;
  const char* mesh = "dp=4";  // of four ranks; sharded over the last axis except tp
  ShardingStrategy strategy = ShardingStrategy::FullShard;
  bool is_tp() const { return std::string(mesh).find("tp") != std::string::npos; }
  bool is_hybrid() const { return std::string(mesh).find("replicate") != std::string::npos; }
};
const std::vector<Way> kWays{
    {"plain", Way::Plain},
    {"flat dp=4", Way::Flat},
    {"use_orig_params dp=4", Way::FlatOrigParams},
    {"fully_shard dp=4", Way::PerParameter},
    {"flat dp=2", Way::Flat, "other=2,dp=2"},
    {"use_orig_params dp=2", Way::FlatOrigParams, "other=2,dp=2"},
    {"flat dp=2,tp=2", Way::Flat, "dp=2,tp=2"},
    {"use_orig_params dp=2,tp=2", Way::FlatOrigParams, "dp=2,tp=2"},
    {"hybrid 2x2", Way::Flat, "replicate=2,dp=2", ShardingStrategy::HybridShard},
    {"no shard", Way::FlatOrigParams, "dp=4", ShardingStrategy::NoShard},
    {"fully_shard dp=2,tp=2", Way::PerParameter, "dp=2,tp=2"},
    {"fully_shard 2x2", Way::PerParameter, "replicate=2,dp=2"},
};

const Tensors& data() {  // one batch per step; drawn once, because ranks are threads and share the generator
  static const Tensors it = batches(5);
  return it;
}

// All ranks have the same batch, so that training is the same in every way.
template <class Optimizer>
struct Training {
  MLPStacked model{nullptr};
  std::shared_ptr<Optimizer> optimizer;

  Training(Rank& me, const Way& way, const typename Optimizer::Options& options) {
    model = MLPStacked(2);
    const auto mesh = me.mesh(way.mesh);
    if (way.is_tp())
      for (auto& layer : model->layers)
        parallelize_module(layer, mesh["tp"], {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    const auto sub_mesh = way.is_hybrid() ? mesh : mesh["dp"];
    if (way.kind == Way::PerParameter) {
      for (auto& layer : model->layers) fully_shard(layer, {.mesh = sub_mesh});
      fully_shard(model, {.mesh = sub_mesh});
    } else if (way.kind != Way::Plain) {
      FullyShardedDataParallel(model, {.device_mesh = sub_mesh,
                                       .sharding_strategy = way.strategy,
                                       .use_orig_params = way.kind == Way::FlatOrigParams,
                                       .auto_wrap_policy = transformer_auto_wrap_policy<models::MLP>()});
    }
    optimizer = std::make_shared<Optimizer>(model->parameters(), options);
  }

  void steps(int n, int first = 0) {
    for (int step = first; step < first + n; step++) {
      optimizer->zero_grad();
      model(data()[static_cast<size_t>(step)]).pow(2).mean().backward();
      optimizer->step();
    }
  }
  StateDict values() { return get_model_state_dict(*model, {.full_state_dict = true}); }
  StateDict state() { return get_optimizer_state_dict(*optimizer, *model, {.full_state_dict = true}); }
};
using Adam = Training<optim::AdamW>;
using SGD = Training<optim::SGD>;
const optim::AdamWOptions kAdam{.lr = 0.01, .eps = 1e-4, .amsgrad = true};

std::string compare(const StateDict& found, const StateDict& wanted, testing::Tolerance tolerance = {1e-5, 1e-6}) {
  auto found_names = found.names(), wanted_names = wanted.names();
  std::sort(found_names.begin(), found_names.end());  // param groups may have another order
  std::sort(wanted_names.begin(), wanted_names.end());
  if (found_names != wanted_names) return c10::str("names ", found_names, " and not ", wanted_names);
  for (const auto& [name, value] : wanted)
    if (auto difference = close(full_value(found.at(name)).to(value.scalar_type()), full_value(value), tolerance);
        !difference.empty())
      return name + ": " + difference;
  return "";
}

// Two steps in each way; the saved dict, full or sharded, equals that of a plain module.
TEST(FsdpStateDict, EqualsThatOfThePlainModule) {
  run_ranks(4, [](Rank& me) {
    Adam plain(me, kWays[0], kAdam);
    plain.steps(2);
    const auto values = state_dict(*plain.model), state = optimizer_state_dict(*plain.optimizer, *plain.model);
    EXPECT_EQ(state.size(), 8 * 4 + 6);
    for (const auto& way : kWays) {
      SCOPED_TRACE(way.name);
      Adam training(me, way, kAdam);
      EXPECT_EQ(training.state().size(), 6);  // only options
      training.steps(2);
      for (const bool full : {true, false}) {
        SCOPED_TRACE(full ? "full" : "sharded");
        const auto found = get_model_state_dict(*training.model, {.full_state_dict = full});
        const auto of_optimizer =
            get_optimizer_state_dict(*training.optimizer, *training.model, {.full_state_dict = full});
        EXPECT_EQ(compare(found, values), "");
        EXPECT_EQ(compare(of_optimizer, state), "");
        for (const auto* dict : {&found, &of_optimizer})
          for (const auto& [name, value] : *dict) EXPECT_TRUE(!full || !is_dtensor(value)) << name;
      }
    }
  });
}

TEST(FsdpStateDict, PlacementsOfShardedValues) {
  run_ranks(4, [](Rank& me) {
    const auto placements = [&](const char* way, const std::string& name) {
      const auto found =
          std::find_if(kWays.begin(), kWays.end(), [&](const Way& w) { return w.name == std::string(way); });
      SGD training(me, *found, {.lr = 0.1, .momentum = 0.9});
      training.steps(1);
      const auto value = get_model_state_dict(*training.model).at("layers.0." + name);
      const auto row = get_optimizer_state_dict(*training.optimizer, *training.model)
                           .at("state.layers.0." + name + ".momentum_buffer");
      EXPECT_EQ(DTensor(value).placements(), DTensor(row).placements());
      EXPECT_EQ(DTensor(value).to_local().storage().nbytes(),
                static_cast<size_t>(DTensor(value).to_local().numel()) * sizeof(float));  // not a view of a larger one
      return c10::str(to_string(DTensor(value).placements()), " on ", DTensor(value).device_mesh());
    };
    EXPECT_EQ(placements("flat dp=4", "net1.weight"), "[S(0)] on dp=4");
    EXPECT_EQ(placements("use_orig_params dp=2", "net2.bias"), "[S(0)] on dp=2");
    EXPECT_EQ(placements("hybrid 2x2", "net1.weight"), "[R, S(0)] on replicate=2,dp=2");
    EXPECT_EQ(placements("no shard", "net1.weight"), "[R] on dp=4");
    EXPECT_EQ(placements("flat dp=2,tp=2", "net1.weight"), "[SS(0,2), S(0)] on dp=2,tp=2");
    EXPECT_EQ(placements("use_orig_params dp=2,tp=2", "net2.weight"), "[S(0), S(1)] on dp=2,tp=2");
    EXPECT_EQ(placements("flat dp=2,tp=2", "net2.bias"), "[S(0), R] on dp=2,tp=2");
  });
}

// Saves in one way after two steps and loads in another way, which continues training like the first. From each way to
// the plain one and back, and to three others.
TEST(FsdpStateDict, CanBeLoadedInAnotherWay) {
  run_ranks(4, [](Rank& me) {
    Adam plain(me, kWays[0], kAdam);
    plain.steps(4);
    const auto values = plain.values(), state = plain.state();
    for (size_t a = 0; a < kWays.size(); a++) {
      Adam from(me, kWays[a], kAdam);
      from.steps(2);
      for (size_t b = 0; b < kWays.size(); b++) {
        const size_t n = kWays.size(), apart = (b + n - a) % n;
        if (a != 0 && b != 0 && apart != 1 && apart != 4 && apart != 6) continue;
        const bool full = (a + b) % 2;
        SCOPED_TRACE(c10::str(kWays[a].name, " -> ", kWays[b].name, full ? ", full" : ", sharded"));
        Adam to(me, kWays[b], {.lr = 1, .amsgrad = true});
        if (b % 3 == 0) to.steps(1);  // loading replaces existing state
        set_model_state_dict(*to.model, get_model_state_dict(*from.model, {.full_state_dict = full}));
        set_optimizer_state_dict(*to.optimizer, *to.model,
                                 get_optimizer_state_dict(*from.optimizer, *from.model, {.full_state_dict = full}));
        to.steps(2, 2);
        EXPECT_EQ(compare(to.values(), values), "");
        EXPECT_EQ(compare(to.state(), state), "");
      }
    }
  });
}

// A full dict saved by four ranks is loaded by two and by one.
TEST(FsdpStateDict, CanBeLoadedByOtherNumbersOfRanks) {
  StateDict values, state, wanted;
  run_ranks(4, [&](Rank& me) {
    SGD training(me, kWays[1], {.lr = 0.1, .momentum = 0.9});
    training.steps(2);
    auto found =
        get_model_state_dict(*training.model, {.full_state_dict = true, .cpu_offload = true, .rank0_only = true});
    auto of_optimizer =
        get_optimizer_state_dict(*training.optimizer, *training.model, {.full_state_dict = true, .rank0_only = true});
    EXPECT_EQ(found.size(), me.rank == 0 ? 8 : 0);
    EXPECT_EQ(of_optimizer.empty(), me.rank != 0);
    training.steps(1, 2);
    const auto end = training.values();
    if (me.rank == 0) values = found, state = of_optimizer, wanted = end;
  });
  for (const int64_t ranks : {1, 2, 3})
    for (const auto kind : {Way::Flat, Way::FlatOrigParams, Way::PerParameter})
      run_ranks(ranks, [&](Rank& me) {
        const auto mesh = c10::str("dp=", ranks);
        SGD training(me, {"", kind, mesh.c_str()}, {.lr = 1, .momentum = 0.9});
        const bool first = me.rank == 0;
        const StateDictOptions options{.broadcast_from_rank0 = true};
        set_model_state_dict(*training.model, first ? values : StateDict(), options);
        set_optimizer_state_dict(*training.optimizer, *training.model, first ? state : StateDict(), options);
        training.steps(1, 2);
        EXPECT_EQ(compare(training.values(), wanted), "");
      });
}

// Ignored parameters, buffers, a rank without elements of a parameter, low precision.
struct MixedImpl : torch::nn::Cloneable<MixedImpl> {
  MixedImpl() { reset(); }
  void reset() override {
    mlp = register_module("mlp", models::MLP(models::mlp_module()));
    head = register_module("head", nn::Linear(10, 3));
    torch::NoGradGuard no_grad;
    head->weight.fill_(0.1);
    head->bias.fill_(0.2);
    count = register_buffer("count", torch::full({2}, 5.0));
  }
  torch::Tensor forward(torch::Tensor x) { return head(mlp(x).to(torch::kFloat)) * count[0]; }
  models::MLP mlp{nullptr};
  nn::Linear head{nullptr};
  torch::Tensor count;
};
TESSERA_MODULE(Mixed);

TEST(FsdpStateDict, OfPartlyShardedModules) {
  run_ranks(4, [](Rank&) {
    Mixed model, again;
    const auto wrap = [](Mixed& m) {
      FullyShardedDataParallel(m, {.use_orig_params = true,
                                   .ignored_modules = {m->head.get()},
                                   .mixed_precision = {.param_dtype = at::kBFloat16}});
    };
    const auto before = state_dict(*model);
    StateDict plain;
    for (const auto& [name, value] : before) plain.insert(name, value.clone());
    wrap(model);
    const auto sharded = get_model_state_dict(*model);
    EXPECT_EQ(sharded.names(), plain.names());
    EXPECT_EQ(compare(sharded, plain, kExact), "");
    EXPECT_TRUE(is_dtensor(sharded.at("mlp.net1.weight")));
    EXPECT_FALSE(is_dtensor(sharded.at("head.weight")));
    optim::SGD opt(model->parameters(), {.lr = 0.1, .momentum = 0.9});
    model(data()[0]).sum().backward();
    opt.step();
    wrap(again);
    again->count.zero_();
    optim::SGD opt_again(again->parameters(), {.lr = 0.2});
    set_model_state_dict(*again, get_model_state_dict(*model));
    set_optimizer_state_dict(opt_again, *again, get_optimizer_state_dict(opt, *model));
    EXPECT_EQ(compare(get_model_state_dict(*again), get_model_state_dict(*model), kExact), "");
    EXPECT_EQ(compare(get_optimizer_state_dict(opt_again, *again), get_optimizer_state_dict(opt, *model), kExact), "");
    EXPECT_EQ(opt_again.lr(0), 0.1);
  });
}

TEST(FsdpStateDict, AFailedLoadChangesNothing) {
  run_ranks(2, [](Rank& me) {
    for (const auto kind : {Way::Flat, Way::FlatOrigParams}) {
      SGD training(me, {"", kind, "dp=2"}, {.lr = 0.1, .momentum = 0.9});
      training.steps(1);
      const auto values = training.values(), state = training.state();
      const auto with = [](StateDict dict, const std::string& out, const std::string& in, const at::Tensor& value) {
        dict.erase(out);
        if (!in.empty()) dict.insert(in, value);
        return dict;
      };
      const auto load = [&](const StateDict& dict) { set_model_state_dict(*training.model, dict); };
      const auto zeros = [](const StateDict& dict) {
        StateDict zero;
        for (const auto& [name, value] : dict) zero.insert(name, torch::zeros_like(value));
        return zero;
      };
      const std::string last = "layers.1.net2.bias";
      EXPECT_ERROR(UsageError, load(with(zeros(values), last, "", {})), "missing from the dict: " + last);
      EXPECT_ERROR(UsageError, load(with(zeros(values), "", "more", torch::ones(1))), "the module has no more");
      EXPECT_ERROR(UsageError, load(with(zeros(values), last, last, torch::ones(3))), "wrong shape: " + last,
                   std::string("is [10] in the module and [3] in the dict"));
      EXPECT_EQ(compare(training.values(), values, kExact), "");

      const auto load_state = [&](const StateDict& dict) {
        set_optimizer_state_dict(*training.optimizer, *training.model, dict);
      };
      const auto row = "state." + last + ".momentum_buffer";
      EXPECT_ERROR(UsageError, load_state(with(zeros(state), row, row, torch::ones(3))), row,
                   std::string("expected [10] found [3]"));
      EXPECT_ERROR(UsageError, load_state(with(zeros(state), "", "state.more.momentum_buffer", torch::ones(3))),
                   "unexpected state.more.momentum_buffer");
      EXPECT_ERROR(UsageError, load_state(with(zeros(state), "param_groups.0.lr", "", {})),
                   "missing param_groups.0.lr");
      EXPECT_EQ(compare(training.state(), state, kExact), "");

      const auto report = set_model_state_dict(*training.model, with(zeros(values), last, "", {}), {.strict = false});
      EXPECT_EQ(report.missing, std::vector<std::string>{last});
      EXPECT_EQ(close(training.values().at(last), values.at(last), kExact), "");
    }
    Adam flat(me, {"", Way::Flat, "dp=2"}, kAdam);
    flat.steps(1);
    auto state = flat.state();
    state.erase("state.layers.0.net1.bias.step");
    state.insert("state.layers.0.net1.bias.step", torch::full({}, 5.0));
    EXPECT_ERROR(UsageError, set_optimizer_state_dict(*flat.optimizer, *flat.model, state),
                 "state.layers.0.net1.bias.step is 5", "state.layers.0.net1.weight.step is 1", "one flat parameter");
    EXPECT_ERROR(UsageError, get_model_state_dict(*flat.model, {.rank0_only = true}), "set full_state_dict");
    const SummonFullParams open(*flat.model);
    EXPECT_ERROR(UsageError, get_model_state_dict(*flat.model), "inside summon_full_params()");
  });
}

}  // namespace
}  // namespace tessera
