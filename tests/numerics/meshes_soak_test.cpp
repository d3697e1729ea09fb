// Under invariant numerics the trainer gives the same bits on every mesh: losses, gradient norms, final weights and
// optimizer state. `make soak` trains GPT and Llama for 300 steps on all meshes; every test run some of them for 3.
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/load.h"
#include "tessera/comm/detail/store/sha256.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/spawn.h"
#include "tests/checkpoint/new_folder.h"
#include "tests/train/mesh_cases.h"

#include <ATen/Parallel.h>

#include <map>

namespace tessera::train {
namespace {

using dcp::NewFolder;
using Options = ConfigChanges;

TrainConfig invariant_gpt() {
  const bool soak = tessera::testing::long_soak();
  TrainConfig config;
  config.model = {.name = "gpt-tiny", .max_seq_len = 16, .layers = 2, .heads = 6, .dim = soak ? 96 : 48};
  config.training = {.steps = soak ? 300 : 3, .batch = 24, .numerics = "invariant", .seed = 3};
  config.optimizer.lr = 5e-3;
  config.optimizer.warmup = 2;
  config.guard.checksum_every = 0;
  return config;
}
TrainConfig invariant_llama() {
  auto config = invariant_gpt();
  const int64_t dim = config.model.dim;
  config.model = {
      .name = "llama-tiny", .max_seq_len = 16, .layers = 2, .heads = 6, .kv_heads = 6, .dim = dim, .ffn_dim = 2 * dim};
  return config;
}

std::string hex(const std::string& bytes) {
  comm::store::Sha256 hash;
  hash.update(bytes);
  std::string text;
  for (const unsigned char byte : hash.finish())
    text += c10::str("0123456789abcdef"[byte / 16], "0123456789abcdef"[byte % 16]);
  return text;
}

// SHA-256 of the losses, and of weights and optimizer state at the end.
struct RunDigest {
  std::string losses, state;
  bool operator==(const RunDigest&) const = default;
};
std::ostream& operator<<(std::ostream& out, const RunDigest& digest) {
  return out << digest.losses.substr(0, 12) << " " << digest.state.substr(0, 12);
}

RunDigest train_on_rank(const TrainConfig& config, const World& world, const std::string& checkpoint,
                        const Setup& setup = {}, const Rank* me = nullptr) {
  Trainer trainer(config, world);
  if (setup) setup(trainer, *me);
  std::string losses;
  for (int64_t i = 0; i < config.training.steps; i++) {
    const auto metrics = trainer.step().metrics;
    for (const double number : {metrics.loss, metrics.grad_norm})
      losses.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  trainer.save(checkpoint);
  StateDict state;
  for (const auto& saved : dcp::open_source(checkpoint).manifest.tensors)
    if (saved.name.starts_with("model.") || saved.name.starts_with("optimizer."))
      state.insert(saved.name, torch::empty(saved.sizes, saved.dtype));
  dcp::load(state, checkpoint, {.strict = false}, world);
  std::map<std::string, std::string> by_name;  // pipeline stages save their tensors in another order
  for (const auto& [name, tensor] : state)
    by_name[name] = std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  std::string bytes;
  for (const auto& [name, values] : by_name) bytes += name + values;
  return {hex(losses), hex(bytes)};
}

RunDigest train_on_threads(TrainConfig config, const std::string& mesh, const Setup& setup = {}) {
  config.parallel.mesh = mesh;
  const NewFolder folder;
  RunDigest digest;
  run_ranks(std::max<int64_t>(1, ranks_of(config.parallel)), [&](Rank& me) {
    const auto mine = train_on_rank(config, me.world, folder / "state", setup, &me);
    if (me.rank == 0) digest = mine;
  });
  return digest;
}

const Options kSequence = {{"parallel.sequence_parallel", "true"}}, kLoss = {{"parallel.loss_parallel", "true"}},
              kBoth = {{"parallel.sequence_parallel", "true"}, {"parallel.loss_parallel", "true"}},
              kCheckpoint = {{"training.activation_checkpoint", "true"}}, kAccumulate = {{"training.accumulate", "2"}},
              kCompile = {{"training.compile", "true"}}, kGPipe = {{"parallel.pipeline_schedule", "GPipe"}},
              kInterleaved = {{"parallel.pipeline_schedule", "InterleavedZeroBubble"}},
              kUlysses = {{"parallel.context_method", "ulysses"}},
              kUlyssesBoth = {{"parallel.context_method", "ulysses"},
                              {"parallel.sequence_parallel", "true"},
                              {"parallel.loss_parallel", "true"}},
              kCompileBoth = {{"training.compile", "true"},
                              {"parallel.sequence_parallel", "true"},
                              {"parallel.loss_parallel", "true"}};

const std::vector<MeshCase> kInvariantCases = {
    {"dp=2", {}, kInEveryRun},
    {"dp=3"},
    {"dp=4"},
    {"dp=6"},
    {"dp=8"},
    {"fsdp=2"},
    {"fsdp=3", {}, kInEveryRun},
    {"fsdp=4"},
    {"fsdp=6"},
    {"fsdp=8"},
    {"tp=2", {}, kInEveryRun},
    {"tp=3"},
    {"tp=6"},
    {"tp=2", kSequence},
    {"tp=3", kSequence},
    {"tp=2", kLoss},
    {"tp=3", kLoss},
    {"tp=2", kBoth, kInEveryRun},
    {"tp=3", kBoth},
    {"tp=6", kBoth},
    {"dp=2,fsdp=2"},
    {"dp=2,fsdp=3"},
    {"dp=3,fsdp=2"},
    {"dp=2,fsdp=4"},
    {"dp=2,tp=2"},
    {"dp=2,tp=3"},
    {"dp=3,tp=2", {}, kInEveryRun},
    {"dp=4,tp=2"},
    {"dp=2,tp=2", kBoth},
    {"dp=3,tp=2", kBoth},
    {"fsdp=2,tp=2", kBoth, kInEveryRun},
    {"fsdp=2,tp=2"},
    {"fsdp=3,tp=2"},
    {"fsdp=2,tp=3"},
    {"fsdp=4,tp=2"},
    {"fsdp=2,tp=2", kSequence},
    {"fsdp=4,tp=2", kBoth},
    {"dp=2,fsdp=2,tp=2"},
    {"dp=2,fsdp=2,tp=2", kBoth},
    {"", kCheckpoint},
    {"dp=2,tp=2", kCheckpoint},
    {"fsdp=2,tp=2", kCheckpoint},
    {"dp=2", kAccumulate},
    {"", kCompile},
    {"dp=2", kCompile},
    {"dp=3", kCompile},
    {"fsdp=2", kCompile},
    {"fsdp=3", kCompile, kInEveryRun},
    {"tp=2", kCompile},
    {"tp=2", kCompileBoth, kInEveryRun},
    {"fsdp=2,tp=2", kCompileBoth},
    {"pp=2", {}, kInEveryRun},
    {"pp=2", kGPipe},
    {"pp=2,dp=2"},
    {"pp=2,dp=3"},
    {"pp=2,fsdp=2"},
    {"pp=2,tp=2"},
    {"pp=2,tp=2", kBoth},
    {"pp=2", kCompile},
    {"pp=2", kInterleaved},
    {"cp=2", kUlysses, kInEveryRun},
    {"dp=3,cp=2", kUlysses},
    {"dp=2,cp=2", kUlysses},
    {"fsdp=2,cp=2", kUlysses},
    {"fsdp=4,cp=2", kUlysses},
    {"cp=2,tp=3", kUlysses},
    {"cp=2,tp=3", kUlyssesBoth, kInEveryRun},
};

void expect_same_bits(const TrainConfig& config) {
  const auto one_rank = train_on_threads(config, "");
  for_each_case(config, kInvariantCases, [&](const TrainConfig& changed, const std::string& name) {
    EXPECT_EQ(train_on_threads(changed, changed.parallel.mesh), one_rank) << name;
    if (tessera::testing::long_soak()) std::cout << "done: " << name << std::endl;
  });
}

TEST(InvariantMeshes, GPTHasTheSameBits) { expect_same_bits(invariant_gpt()); }
TEST(InvariantMeshes, LlamaHasTheSameBits) { expect_same_bits(invariant_llama()); }

// Router, experts and auxiliary loss: a virtual shard is routed as a batch of its own.
TEST(InvariantMeshes, MixtureOfExpertsHasTheSameBits) {
  auto config = invariant_llama();
  config.model.name = "mixtral-tiny";
  config.model.aux_loss_weight = 0.01;
  config.training.steps = 2;
  const auto one_rank = train_on_threads(config, "");
  for (const auto* mesh : {"dp=2", "fsdp=3", "tp=2", "pp=2"})
    EXPECT_EQ(train_on_threads(config, mesh), one_rank) << mesh;
}

// Shared heads of keys and values.
TEST(InvariantMeshes, GroupedQueryAttentionHasTheSameBits) {
  auto config = invariant_llama();
  config.model.kv_heads = 2;
  config.training.steps = 2;
  EXPECT_EQ(train_on_threads(config, "tp=2"), train_on_threads(config, ""));
}

// The comparison can fail: a sum whose order depends on the number of ranks changes the bits.
TEST(InvariantMeshes, AnOrderDependentSumIsCaught) {
  const auto plant = [](Trainer& trainer, const Rank& me) {
    const auto parts = static_cast<int64_t>(2 * me.size() + 1);  // two halves would be nodes of the tree
    for (const auto& p : trainer.model().module().parameters()) {
      if (p.dim() != 1) continue;
      p.register_hook([parts](const at::Tensor& gradient) {
        auto sum = torch::zeros({}, gradient.options());
        for (const auto& part : gradient.chunk(parts)) sum = sum + part.sum();
        return gradient + (sum - gradient.sum());  // 0 but for rounding
      });
      break;
    }
  };
  auto config = invariant_gpt();
  config.training.steps = 3;
  // The first step compares virtual shards at once with one by one.
  std::string error;
  try {
    train_on_threads(config, "", plant);
  } catch (const std::runtime_error& failed) {
    error = failed.what();
  }
  EXPECT_CONTAINS(error, "virtual shards at once has other bits than one by one");
  config.training.accumulate = 24;
  const auto one_rank = train_on_threads(config, "", plant);
  EXPECT_EQ(train_on_threads(config, "", plant), one_rank);
  config.training.accumulate = 12;
  EXPECT_NE(train_on_threads(config, "dp=2", plant), one_rank);
}

// Processes over each backend, with two threads; the long form also with one, over dp, and compiled.
TEST(InvariantMeshes, ProcessesHaveTheBitsOfOneRank) {
  const bool soak = tessera::testing::long_soak();
  auto config = invariant_gpt();
  config.training.steps = soak ? 6 : 2;
  const auto expected = train_on_threads(config, "");
  const std::vector<std::string> meshes =
      soak ? std::vector<std::string>{"dp=2", "fsdp=2", "tp=2"} : std::vector<std::string>{"fsdp=2", "tp=2"};
  tessera::testing::spawn_ranks_over_each(2, [&](Rank& me) {
    for (const auto& mesh : meshes)
      for (const int threads : {1, 2}) {
        if (threads == 1 && !soak) continue;
        at::set_num_threads(threads);
        auto on_mesh = config;
        on_mesh.training.compile = soak && threads == 2;
        on_mesh.parallel.mesh = mesh;
        const auto folder = c10::str("/tmp/tessera-invariant-", getppid(), "-", mesh, "-", threads);
        EXPECT_EQ(train_on_rank(on_mesh, me.world, folder), expected) << mesh << " " << threads;
        me.group()->barrier().wait();  // every rank has read it
        if (me.rank == 0) std::filesystem::remove_all(folder);
      }
  });
}

std::string losses_after(TrainConfig config, const std::string& mesh, int64_t steps, const std::string& from,
                         const std::string& to, const std::string& file) {
  config.parallel.mesh = mesh;
  config.checkpoint.resume = from;
  run_ranks(std::max<int64_t>(1, ranks_of(config.parallel)), [&](Rank& me) {
    Trainer trainer(config, me.world);
    std::shared_ptr<LossFile> losses;
    if (me.rank == 0) losses = std::make_shared<LossFile>(file, trainer.steps_made());
    for (int64_t i = 0; i < steps; i++) {
      const auto outcome = trainer.step();
      if (losses) losses->on_step(outcome.metrics);
    }
    if (!to.empty()) trainer.save(to);
  });
  return dcp::read(file);
}

TEST(InvariantMeshes, ARunThatIsResumedOnOtherMeshesHasTheLossFileOfOneRank) {
  auto config = invariant_gpt();
  config.training.steps = 6;
  const NewFolder folder;
  const auto expected = losses_after(config, "", 6, "", "", folder / "one");
  losses_after(config, "fsdp=4", 3, "", folder / "2",
               folder / "losses");  // the last of its steps is not in the checkpoint
  losses_after(config, "fsdp=4", 2, "", folder / "first", folder / "losses");
  losses_after(config, "tp=2", 2, folder / "first", folder / "second", folder / "losses");
  EXPECT_EQ(losses_after(config, "dp=3", 2, folder / "second", "", folder / "losses"), expected);
  EXPECT_EQ(std::count(expected.begin(), expected.end(), '\n'), 6);
}

TEST(InvariantMeshes, WhatIsNotCoveredIsRefusedByName) {
  const auto refused = [](const Options& options, int64_t ranks, const char* what) {
    auto config = invariant_gpt();
    for (const auto& [key, value] : options) set_option(config, key, value);
    EXPECT_ERROR(UsageError, check(config, ranks), what);
  };
  refused({{"parallel.mesh", "pp=2"}, {"parallel.microbatches", "2"}}, 2, "virtual shards of a rank is a microbatch");
  refused({{"parallel.mesh", "pp=2"}, {"parallel.pipeline_schedule", "ZBVZeroBubble"}}, 2, "a tied embedding");
  refused({{"parallel.mesh", "cp=2"}}, 2, "the axis cp of mesh 'cp=2' with ring attention");
  refused({{"parallel.mesh", "pp=2,cp=2"}, {"parallel.context_method", "ulysses"}}, 4, "beside pp");
  refused({{"model.dropout", "0.1"}}, 1, "dropout");
  refused({{"training.precision", "bf16"}}, 1, "--precision bf16");
  refused({{"model.name", "mixtral-tiny"}, {"model.heads", "0"}, {"parallel.mesh", "dp=2,ep=2"}}, 2, "the axis ep");
  refused({{"training.batch", "64"}}, 1, "not divisible by 24 virtual shards");
  refused({{"parallel.mesh", "dp=5"}, {"training.batch", "120"}}, 5, "not divisible by 5");
  refused({{"training.numerics", "exact"}}, 1, "allowed: default, invariant");
}

}  // namespace
}  // namespace tessera::train
