// Random sequences of what a training loop does, on a data parallel module and beside it on a plain one: freeze,
// unfreeze, forward of a random subset of submodules, accumulation with and without synchronization, zero_grad, step,
// eval forward, writes to local values, state dicts. Parameters, gradients and outputs must be equal at every point.
// A failure prints the shortest sequence that still fails. `make soak` runs 20,000 sequences, every test run 500.
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/state_dict.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/detail/soak.h"
#include "tests/fixtures/fsdp.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <sstream>

namespace tessera::data_parallel {
namespace {

using fixtures::Rank;

constexpr int64_t kWidth = 3;
constexpr size_t kBlocks = 2;
// Bits of a mask: which submodules a forward uses.
constexpr uint32_t kBranchBits = 0b0011, kBlockBits = 0b1100, kAllBits = 0b1111;

// `stem` is always used. `left` and `right` belong to the root's parameter group, each block is a group of its own.
struct BranchesImpl : torch::nn::Cloneable<BranchesImpl> {
  nn::Linear stem{nullptr}, left{nullptr}, right{nullptr};
  std::vector<nn::Linear> blocks;
  BranchesImpl() { reset(); }
  void reset() override {
    blocks.clear();
    stem = register_module("stem", nn::Linear(kWidth, kWidth));
    left = register_module("left", nn::Linear(kWidth, kWidth));
    right = register_module("right", nn::Linear(kWidth, kWidth));
    for (size_t k = 0; k < kBlocks; k++)
      blocks.push_back(register_module(c10::str("block", k), nn::Linear(kWidth, kWidth)));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
    const at::NoGradGuard no_grad;
    for (auto& item : named_parameters()) {
      item.value().set_data(item.value().to(at::kDouble));
      item.value().uniform_(-0.6, 0.6, generator);
    }
  }
  torch::Tensor forward(torch::Tensor x, int64_t mask) {
    x = stem(x);
    if (mask & 1) x = x + left(x).tanh();
    if (mask & 2) x = x + right(x).tanh();
    for (size_t k = 0; k < kBlocks; k++)
      if (mask & (4 << k)) x = x + blocks[k](x).tanh();
    return x;
  }
};
TESSERA_MODULE(Branches);

// The submodule that each parameter belongs to, as a mask. 0: always used.
constexpr uint32_t kUsedBy[] = {0, 0, 1, 1, 2, 2, 4, 4, 8, 8};

// ---- kinds of data parallelism

enum class Wrapper : uint8_t { DDP, Replicate, FullyShard, HSDP, FlatParameters };
struct WrapperKind {
  const char* name;
  Wrapper wrapper;
  uint32_t optional_bits;  // submodules that a pass with synchronization may leave out
  uint32_t rank_bits;      // submodules that may be used on some ranks only
  bool freezes = true;
  DDPOptions ddp = {};
  ReshardAfterForward reshard = {};
};
const WrapperKind kWrapperKinds[] = {
    {"DistributedDataParallel", Wrapper::DDP, 0, 0},
    {"DistributedDataParallel, find_unused", Wrapper::DDP, kAllBits, kAllBits, true, {.find_unused_parameters = true}},
    {"DistributedDataParallel, static_graph", Wrapper::DDP, 0, 0, false, {.static_graph = true}},
    {"replicate", Wrapper::Replicate, 0, 0},
    {"replicate, find_unused", Wrapper::Replicate, kAllBits, kAllBits, true, {.find_unused_parameters = true}},
    {"fully_shard", Wrapper::FullyShard, kAllBits, kBranchBits},
    {"fully_shard, reshard", Wrapper::FullyShard, kAllBits, kBranchBits, true, {}, true},
    {"fully_shard, no reshard", Wrapper::FullyShard, kAllBits, kBranchBits, true, {}, false},
    {"HSDP", Wrapper::HSDP, kAllBits, kBranchBits},
    {"FullyShardedDataParallel", Wrapper::FlatParameters, kAllBits, kBranchBits},
    {"FullyShardedDataParallel, NO_SHARD", Wrapper::FlatParameters, kAllBits, kBranchBits, true, {}, false},
};

enum class GradSync : uint8_t { All, None, NoAllReduce };

// One rank's data parallel module, behind the same calls for each kind.
class SequenceTrainee {
 public:
  SequenceTrainee(Branches model, const WrapperKind& kind, uint32_t variant, Rank& me)
      : model_(model), wrapper_(kind.wrapper) {
    auto ddp = kind.ddp;
    ddp.bucket_cap_mb = 100.0 / (1 << 20);
    ddp.gradient_as_bucket_view = variant & 1;
    const auto n = me.size();
    if (wrapper_ == Wrapper::DDP) ddp_.emplace(model_, ddp);
    if (wrapper_ == Wrapper::Replicate) replicate(model_, {ddp});
    if (wrapper_ == Wrapper::FullyShard || wrapper_ == Wrapper::HSDP) {
      const auto mesh = wrapper_ == Wrapper::HSDP ? me.mesh({2, n / 2}, {"replicate", "shard"}) : me.mesh({n}, {"dp"});
      for (auto& block : model_->blocks) fully_shard(block, {.mesh = mesh, .reshard_after_forward = kind.reshard});
      fully_shard(model_, {.mesh = mesh, .reshard_after_forward = kind.reshard});
    }
    if (wrapper_ == Wrapper::FlatParameters) {
      const bool no_shard = std::string(kind.name).find("NO_SHARD") != std::string::npos;
      const FSDPOptions options{.device_mesh = me.mesh({n}, {"dp"}),
                                .sharding_strategy = no_shard      ? ShardingStrategy::NoShard
                                                     : variant & 1 ? ShardingStrategy::ShardGradOp
                                                                   : ShardingStrategy::FullShard,
                                .use_orig_params = true};
      for (auto& block : model_->blocks) FullyShardedDataParallel(block, options);
      flat_.emplace(model_, options);
    }
  }

  at::Tensor forward(const at::Tensor& x, int64_t mask) {
    if (ddp_) return (*ddp_)(x, mask);
    return flat_ ? (*flat_)(x, mask) : model_(x, mask);
  }
  void set_sync(GradSync sync) {
    const bool on = sync != GradSync::None;
    if (ddp_) return (*ddp_)->set_requires_gradient_sync(on);
    if (wrapper_ == Wrapper::Replicate) return replicated(model_).set_requires_gradient_sync(on);
    no_sync_.reset();
    if (flat_) {
      if (!on) no_sync_.emplace(*model_);
      return;
    }
    fsdp_module(model_).set_requires_gradient_sync(on);
    fsdp_module(model_).set_requires_all_reduce(sync == GradSync::All);
  }
  bool is_sharded() const { return wrapper_ != Wrapper::DDP && wrapper_ != Wrapper::Replicate; }

  // This rank's part of a global tensor that is distributed like parameter i.
  at::Tensor local_part(size_t i, const at::Tensor& global) const {
    const auto parameter = model_->parameters()[i];
    for (const auto& sharded : fsdp::find_sharded_modules(*model_))
      for (size_t p = 0; p < sharded->group().params().size(); p++)
        if (sharded->group().params()[p].tensor.is_same(parameter))
          return sharded->group().layout().shard_of(p, global, sharded->group().shard_group()->rank()).reshape({-1});
    return global.reshape({-1});
  }
  // A state dict between forward and backward has sharded values.
  void check_plain_state_dict() const {
    if (!is_sharded()) return;
    const auto dict = state_dict(*model_);
    for (size_t i = 0; i < model_->parameters().size(); i++) {
      const auto& value = dict.at(model_->named_parameters().keys()[i]);
      const auto wanted =
          local_part(i, torch::zeros(i % 2 ? at::IntArrayRef({kWidth}) : at::IntArrayRef({kWidth, kWidth})));
      TORCH_CHECK(tessera::detail::local_or_self(value).numel() == wanted.numel(), "state_dict between forward and ",
                  "backward: ", model_->named_parameters().keys()[i], " has ", value.sizes());
    }
  }

  Branches& model() { return model_; }

 private:
  Branches model_;
  Wrapper wrapper_;
  std::optional<DistributedDataParallel<Branches>> ddp_;
  std::optional<FullyShardedDataParallel<Branches>> flat_;
  std::optional<FSDPNoSync> no_sync_;
};

// ---- sequences

enum class Action : uint8_t { Freeze, Unfreeze, Train, ZeroGrad, Step, Eval, Write, StateDict };
struct SequenceStep {
  Action action;
  uint32_t bits = 0;  // Freeze, Unfreeze, Write: parameters. Train, Eval: submodules
  uint32_t rank_bits[4] = {};
  GradSync sync = GradSync::All;
  uint32_t way = 0;   // Train: what happens between forward and backward. Write, ZeroGrad: how
  uint32_t seed = 0;  // of the batches

  uint32_t mask(int64_t rank) const { return bits ^ rank_bits[rank]; }
};
std::ostream& operator<<(std::ostream& out, const SequenceStep& step) {
  static constexpr const char* kNames[] = {"freeze", "unfreeze", "train", "zero_grad",
                                           "step",   "eval",     "write", "state_dict"};
  static constexpr const char* kSyncs[] = {"", " without sync", " without all-reduce"};
  static constexpr const char* kBetween[] = {"", ", eval before backward", ", state_dict before backward",
                                             ", two forwards"};
  out << kNames[static_cast<size_t>(step.action)];
  const bool trains = step.action == Action::Train;
  if (trains) out << kSyncs[static_cast<size_t>(step.sync)] << kBetween[step.way];
  if (step.action == Action::Write || step.action == Action::ZeroGrad) out << " way " << step.way;
  out << " " << std::hex << step.bits << std::dec;
  for (const uint32_t bits : step.rank_bits)
    if (bits)
      return out << " ^ " << step.rank_bits[0] << "," << step.rank_bits[1] << "," << step.rank_bits[2] << ","
                 << step.rank_bits[3];
  return out;
}

struct Sequence {
  const WrapperKind* kind;
  int64_t ranks = 1;
  uint32_t variant = 0, frozen_at_start = 0;
  std::vector<SequenceStep> steps = {};
};
std::ostream& operator<<(std::ostream& out, const Sequence& sequence) {
  out << sequence.kind->name << " on " << sequence.ranks << " ranks, variant " << sequence.variant
      << ", frozen before it is wrapped: " << std::hex << sequence.frozen_at_start << std::dec << "\n";
  for (const auto& step : sequence.steps) out << "  " << step << "\n";
  return out;
}

Sequence draw_sequence(const WrapperKind& kind, uint32_t seed) {
  std::mt19937 random(seed);
  const auto draw = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  Sequence s{&kind};
  s.ranks = kind.wrapper == Wrapper::HSDP ? 4 : std::array{1, 2, 2, 2, 3, 4}[draw(6)];
  s.variant = draw(2);
  if (kind.freezes && draw(2)) s.frozen_at_start = random() & random() & 0x3ff;
  const uint32_t static_mask = kAllBits & random();
  static constexpr Action kActions[] = {Action::Freeze, Action::Unfreeze, Action::Train,    Action::Train,
                                        Action::Train,  Action::Train,    Action::ZeroGrad, Action::Step,
                                        Action::Step,   Action::Eval,     Action::Write,    Action::StateDict};
  const size_t length = 3 + draw(7);
  while (s.steps.size() < length) {
    SequenceStep step{kActions[draw(std::size(kActions))]};
    step.seed = draw(1000);
    switch (step.action) {
      case Action::Freeze:
      case Action::Unfreeze:
        if (!kind.freezes) continue;
        step.bits = random() & (draw(3) ? random() : ~0u) & 0x3ff;
        break;
      case Action::Train: {
        const bool is_static = kind.ddp.static_graph;
        step.sync = draw(3)                                    ? GradSync::All
                    : kind.wrapper == Wrapper::HSDP && draw(2) ? GradSync::NoAllReduce
                                                               : GradSync::None;
        // DDP without find_unused: passes without synchronization may leave out submodules.
        const bool reduces_each = kind.optional_bits == 0 && step.sync == GradSync::All;
        step.bits = is_static ? static_mask : reduces_each ? kAllBits : random() & kAllBits;
        if (!is_static && !reduces_each && draw(2))
          for (auto& bits : step.rank_bits) bits = random() & (kind.optional_bits == 0 ? kAllBits : kind.rank_bits);
        step.way = draw(3) ? 0 : draw(is_static ? 3 : 4);
        break;
      }
      case Action::Eval:
        step.bits = random() & kAllBits;
        break;
      case Action::Write:
        step.bits = draw(2) ? 0x3ff : random() & 0x3ff;
        step.way = draw(3);
        break;
      case Action::ZeroGrad:
        step.way = draw(2);
        break;
      case Action::Step:
      case Action::StateDict:
        break;
    }
    s.steps.push_back(step);
  }
  // What the sequence left behind shows in one more step.
  if (kind.freezes) s.steps.push_back({.action = Action::Unfreeze, .bits = 0x3ff});
  s.steps.push_back({.action = Action::Train, .bits = kind.ddp.static_graph ? static_mask : kAllBits, .seed = 7});
  s.steps.push_back({.action = Action::Step});
  s.steps.push_back({.action = Action::StateDict});
  return s;
}

at::Tensor sequence_batch(uint32_t seed, int64_t rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed * 8 + static_cast<uint64_t>(rank));
  return at::randn({2, kWidth}, generator, at::TensorOptions(at::kDouble));
}

// Runs a sequence on one rank, on the data parallel module and on the plain one.
class SequenceRun {
 public:
  SequenceRun(const Sequence& sequence, Rank& me)
      : sequence_(sequence),
        me_(me),
        plain_(frozen(Branches(), sequence.frozen_at_start)),
        plain_optimizer_(plain_->parameters(), kOptions),
        trainee_(frozen(Branches(), sequence.frozen_at_start), *sequence.kind, sequence.variant, me),
        optimizer_(trainee_.model()->parameters(), kOptions) {}

  void run() {
    for (size_t at = 0; at < sequence_.steps.size(); at++) try {
        perform(sequence_.steps[at]);
      } catch (const c10::Error& error) {
        throw std::runtime_error(
            c10::str("line ", at + 1, " (", sequence_.steps[at], "): ", error.what_without_backtrace()));
      }
  }

 private:
  inline static const optim::SGDOptions kOptions{.lr = 0.05, .momentum = 0.9};

  static Branches frozen(Branches model, uint32_t which) {
    set_requires_grad(model, which, false);
    return model;
  }
  static void set_requires_grad(Branches& model, uint32_t which, bool on) {
    auto parameters = model->parameters();
    for (size_t i = 0; i < parameters.size(); i++)
      if (which >> i & 1) parameters[i].requires_grad_(on);
  }

  void perform(const SequenceStep& step) {
    switch (step.action) {
      case Action::Freeze:
      case Action::Unfreeze:
        set_requires_grad(plain_, step.bits, step.action == Action::Unfreeze);
        return set_requires_grad(trainee_.model(), step.bits, step.action == Action::Unfreeze);
      case Action::Train:
        return train(step);
      case Action::ZeroGrad: {
        // If gradients that are not reduced exist on some ranks only, only these would have zeros.
        const bool set_to_none = step.way == 0 || (unreduced_ && uneven_);
        plain_optimizer_.zero_grad(set_to_none);
        optimizer_.zero_grad(set_to_none);
        uneven_ = false;
        unreduced_ &= !set_to_none && trainee_.is_sharded();  // zeros that are not reduced are unsharded
        return check_gradients();
      }
      case Action::Step:
        if (unreduced_) return;
        plain_optimizer_.step();
        optimizer_.step();
        return check_values();
      case Action::Eval:
        return eval(step.bits, step.seed);
      case Action::Write:
        return write(step);
      case Action::StateDict:
        return check_state_dict();
    }
  }

  // True if the loss of every rank has a graph.
  bool can_train(const SequenceStep& step) {
    const auto parameters = plain_->parameters();
    for (int64_t rank = 0; rank < sequence_.ranks; rank++) {
      bool any = false;
      for (size_t i = 0; i < parameters.size(); i++)
        any |= parameters[i].requires_grad() && (kUsedBy[i] == 0 || (kUsedBy[i] & step.mask(rank)));
      if (!any) return false;
    }
    return true;
  }

  template <class Forward>
  static at::Tensor loss_of(Forward forward, const SequenceStep& step, int64_t rank) {
    auto loss = forward(sequence_batch(step.seed, rank), step.mask(rank)).pow(2).sum();
    if (step.way == 3) loss = loss + forward(sequence_batch(step.seed + 1, rank), step.mask(rank)).sum();
    return loss;
  }

  void train(const SequenceStep& step) {
    if (!can_train(step)) return;
    trainee_.set_sync(step.sync);
    auto loss = loss_of([&](const at::Tensor& x, uint32_t mask) { return trainee_.forward(x, mask); }, step, me_.rank);
    if (step.way == 1) eval(kAllBits, step.seed);
    if (step.way == 2) trainee_.check_plain_state_dict();
    loss.backward();
    for (int64_t rank = 0; rank < sequence_.ranks; rank++)
      (loss_of([&](const at::Tensor& x, uint32_t mask) { return plain_(x, mask); }, step, rank) /
       static_cast<double>(sequence_.ranks))
          .backward();
    unreduced_ = step.sync != GradSync::All;
    for (const uint32_t bits : step.rank_bits) uneven_ |= bits != step.rank_bits[0];
    uneven_ &= unreduced_;
    check_gradients();
  }

  void eval(uint32_t mask, uint32_t seed) {
    const at::NoGradGuard no_grad;
    const auto x = sequence_batch(seed + 5, 0);
    expect_same("output", trainee_.forward(x, mask), plain_(x, mask));
  }

  void write(const SequenceStep& step) {
    const at::NoGradGuard no_grad;
    auto plain = plain_->parameters(), parameters = trainee_.model()->parameters();
    for (size_t i = 0; i < plain.size(); i++) {
      if (!(step.bits >> i & 1)) continue;
      plain[i].mul_(0.875);
      if (step.way == 0) parameters[i].mul_(0.875);
      if (step.way == 1) parameters[i].data().mul_(0.875);
      if (step.way == 2) (is_dtensor(parameters[i]) ? DTensor(parameters[i]).to_local() : parameters[i]).mul_(0.875);
    }
    check_values();
  }

  static void expect_same(const std::string& what, const at::Tensor& found, const at::Tensor& wanted) {
    const auto difference = testing::close(found.detach(), wanted.detach(), {1e-9, 1e-12});
    TORCH_CHECK(difference.empty(), what, ": ", difference);
  }

  void check_gradients() {
    if (unreduced_) return;
    auto plain = plain_->parameters(), parameters = trainee_.model()->parameters();
    for (size_t i = 0; i < plain.size(); i++) {
      const auto name = "gradient of " + plain_->named_parameters().keys()[i];
      const auto& found = parameters[i].grad();
      const auto& wanted = plain[i].grad();
      if (!found.defined() && !wanted.defined()) continue;
      const bool is_empty = wanted.defined() && trainee_.local_part(i, wanted).numel() == 0;
      if (!found.defined() && is_empty) continue;
      TORCH_CHECK(found.defined() && wanted.defined(), name, found.defined() ? " exists" : " is missing");
      expect_same(name, tessera::detail::local_or_self(found).reshape({-1}), trainee_.local_part(i, wanted));
    }
  }

  void check_values() {
    auto plain = plain_->parameters(), parameters = trainee_.model()->parameters();
    for (size_t i = 0; i < plain.size(); i++)
      expect_same(plain_->named_parameters().keys()[i], tessera::detail::local_or_self(parameters[i]).reshape({-1}),
                  trainee_.local_part(i, plain[i].detach()));
  }

  void check_state_dict() {
    const auto dict = get_model_state_dict(*trainee_.model(), {.full_state_dict = true});
    for (const auto& [name, value] : state_dict(*plain_)) expect_same("state dict: " + name, dict.at(name), value);
  }

  const Sequence& sequence_;
  Rank& me_;
  Branches plain_;
  optim::SGD plain_optimizer_;
  SequenceTrainee trainee_;
  optim::SGD optimizer_;
  bool unreduced_ = false;  // gradients of a pass without synchronization wait for a later one
  bool uneven_ = false;     // ranks used different submodules in such a pass
};

// "", or what went wrong.
std::string run_sequence(const Sequence& sequence) {
  try {
    fixtures::run_ranks(sequence.ranks, [&](Rank& me) { SequenceRun(sequence, me).run(); },
                        {.timeout = std::chrono::seconds(20)});
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Leaves out steps as long as the sequence still fails.
Sequence shortest_failing(Sequence sequence) {
  for (size_t at = 0; at < sequence.steps.size();) {
    auto shorter = sequence;
    shorter.steps.erase(shorter.steps.begin() + static_cast<ptrdiff_t>(at));
    if (run_sequence(shorter).empty())
      at++;
    else
      sequence = shorter;
  }
  return sequence;
}

// Sequences that once failed. 8512: a rank whose shard has only frozen elements kept a stale buffer. 12227: a frozen
// group that one rank alone passed through in backward was reduced by that rank alone. 13289: a parameter that was
// unfrozen under no_sync() alone was not reduced.
TEST(SequencesSoak, SequencesThatFailed) {
  for (const uint32_t seed : {8512, 12227, 13289})
    EXPECT_EQ(run_sequence(draw_sequence(kWrapperKinds[seed % std::size(kWrapperKinds)], seed)), "") << seed;
}

TEST(SequencesSoak, EqualThePlainModule) {
  const auto seeds = testing::soak_seeds(1, 500, 20'000);
  std::map<const WrapperKind*, int> failed;
  for (uint32_t seed = seeds.first; seed < seeds.end; seed++) {
    const auto& kind = kWrapperKinds[seed % std::size(kWrapperKinds)];
    const auto sequence = draw_sequence(kind, seed);
    if (run_sequence(sequence).empty() || failed[&kind]++ > 0) continue;
    const auto shortest = shortest_failing(sequence);
    ADD_FAILURE() << "seed " << seed << ": " << shortest << run_sequence(shortest);
  }
  for (const auto& [kind, times] : failed)
    if (times > 0) ADD_FAILURE() << kind->name << ": " << times << " sequences failed";
}

}  // namespace
}  // namespace tessera::data_parallel
