// A transformer trained 20 steps by our fully_shard and FullyShardedDataParallel and by PyTorch's, from the same
// weights, on two ranks with data of their own: the same losses, gradients and parameters, and no more collectives.
#include "ask_python.h"
#include "model_settings.h"

#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/state/state_dict.h"
#include "tessera/optim/adam.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

#include <map>
#include <sstream>

namespace tessera {
namespace {

using models::GPT2;
using parity::Answer;
using parity::Message;
using testing::close;
using testing::Rank;
using testing::run_ranks;

constexpr int64_t kRanks = 2, kSteps = 20;
// Rows that two ranks cannot share equally.
const models::GPT2Config kConfig{.vocab_size = 13, .max_seq_len = 9, .n_layer = 2, .n_head = 2, .n_embd = 12};

struct Case {
  std::string name;
  std::string text;  // for Python
  std::function<void(GPT2& model, const DeviceMesh& mesh)> cut;
};

template <class F>
void inner_first(GPT2& model, F cut) {
  for (auto& block : model->h) cut(block);
  cut(model);
}
Case sharded(const std::string& name, bool reshard) {
  return {name, c10::str("api=fully_shard reshard=", reshard ? 1 : 0), [=](GPT2& model, const DeviceMesh& mesh) {
            inner_first(model, [&](auto& m) { fully_shard(m, {.mesh = mesh, .reshard_after_forward = reshard}); });
          }};
}
Case flat(ShardingStrategy strategy) {
  return {c10::str(strategy), c10::str("api=fsdp strategy=", strategy), [=](GPT2& model, const DeviceMesh& mesh) {
            inner_first(model, [&](auto& m) {
              FullyShardedDataParallel(m,
                                       {.device_mesh = mesh, .sharding_strategy = strategy, .use_orig_params = true});
            });
          }};
}
const Case kCases[] = {sharded("fully_shard", true), sharded("fully_shard, kept", false),
                       flat(ShardingStrategy::FullShard), flat(ShardingStrategy::ShardGradOp)};

// {"_allgather_base_", 3}: by what they do, since an all-gather has several names.
using Counts = std::map<std::string, int64_t>;
void add(Counts& counts, const std::string& name, int64_t count) {
  const bool scatters = name.find("scatter") != std::string::npos, gathers = name.find("gather") != std::string::npos;
  counts[scatters ? "reduce_scatter" : gathers ? "all_gather" : name] += count;
}
Counts counted(CommDebugMode& mode) {
  Counts counts;
  for (const auto& [name, count] : mode.get_comm_counts().by_name()) add(counts, name, count);
  mode.reset();
  return counts;
}
Counts read_counts(const std::string& text) {  // "_allgather_base_=3 _reduce_scatter_base_=3"
  Counts counts;
  std::istringstream in(text);
  for (std::string word; in >> word;)
    add(counts, word.substr(0, word.find('=')), std::stoll(word.substr(word.find('=') + 1)));
  return counts;
}
void expect_no_more(const Counts& ours, Counts theirs) {
  for (const auto& [kind, count] : ours) EXPECT_LE(count, theirs[kind]) << kind;
  EXPECT_FALSE(theirs.empty());  // they were counted
}

// By name, whole. Inside of SummonFullParams parameters are plain.
std::map<std::string, at::Tensor> whole(GPT2& model, at::Tensor (*pick)(const at::Tensor&)) {
  std::map<std::string, at::Tensor> found;
  for (const auto& item : model->named_parameters()) {
    const auto t = pick(item.value());
    found[item.key()] = is_dtensor(t) ? DTensor(t).full_tensor() : t.clone();
  }
  return found;
}
at::Tensor gradient_of(const at::Tensor& p) { return p.grad(); }
at::Tensor value_of(const at::Tensor& p) { return p.detach(); }

TEST(FsdpParity, TrainsAsPyTorchDoes) {
  torch::manual_seed(7);
  GPT2 start(kConfig);
  {
    torch::NoGradGuard no_grad;
    for (auto& p : start->parameters()) p.uniform_(-0.3, 0.3);
  }
  Message question;
  question.texts["model"] = models::settings(kConfig);
  for (const auto& c : kCases) question.texts[c.name] = c.text;
  const auto tokens = torch::randint(kConfig.vocab_size, {kRanks, 2, 7}, torch::kLong);
  const auto targets = torch::randint(kConfig.vocab_size, {kRanks, 2, 7}, torch::kLong);
  question.tensors = {{"tokens", tokens}, {"targets", targets}};
  for (const auto& [key, t] : state_dict(*start)) question.tensors["model/weights/" + key] = t.clone();
  const Answer answer = parity::ask_python("fsdp.py", question);
  SKIP_UNLESS_ANSWERED(answer);

  for (const auto& c : kCases)
    run_ranks(kRanks, [&](Rank& me) {
      SCOPED_TRACE(c10::str(c.name, ", rank ", me.rank));
      const auto theirs = [&](const std::string& name) { return c10::str(c.name, "/", me.rank, "/", name); };
      auto model = clone(start);
      c.cut(model, me.mesh("dp=2"));
      const bool distributed = is_dtensor(model->parameters()[0]);
      optim::AdamW optimizer(model->parameters(), {.lr = 0.01, .eps = 1e-5, .weight_decay = 0.01});
      std::vector<at::Tensor> losses;
      for (int64_t step = 0; step < kSteps; step++) {
        optimizer.zero_grad();
        CommDebugMode mode;
        const auto loss = models::loss(model(tokens[me.rank]), targets[me.rank]);
        const auto forward = counted(mode);
        loss.backward();
        const auto backward = counted(mode);
        if (step == 1) {
          expect_no_more(forward, read_counts(answer.texts.at(theirs("forward"))));
          expect_no_more(backward, read_counts(answer.texts.at(theirs("backward"))));
        }
        if (step == 0 && distributed) {
          for (const auto& [name, grad] : whole(model, gradient_of))
            EXPECT_EQ(close(grad, answer.tensors.at(theirs("grads/" + name)), {1e-5, 1e-6}), "") << name;
        }
        optimizer.step();
        losses.push_back(loss.detach());
      }
      EXPECT_EQ(close(torch::stack(losses), answer.tensors.at(theirs("losses")), {0, 1e-5}), "");
      const SummonFullParams summoned(*model);
      for (const auto& [name, value] : whole(model, value_of))
        EXPECT_EQ(close(value, answer.tensors.at(theirs("parameters/" + name)), {1e-4, 1e-4}), "") << name;
    });
}

}  // namespace
}  // namespace tessera
