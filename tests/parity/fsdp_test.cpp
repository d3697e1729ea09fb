// A transformer trained for 20 steps with our fully_shard and FullyShardedDataParallel and with PyTorch's, from the
// same weights, on two ranks with different data: equal losses, gradients and parameters, and not more collectives.
#include "model_request.h"
#include "run_python.h"

#include "tessera/debug/comm_debug_mode.h"
#include "tessera/models/loss.h"
#include "tessera/optim/adam.h"
#include "tessera/state/state_dict.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/fsdp.h"

#include <torch/torch.h>

#include <map>
#include <sstream>

namespace tessera {
namespace {

using namespace fixtures;
using models::GPT2;
using parity::Message;
using parity::Response;

constexpr int64_t kFsdpRanks = 2, kFsdpSteps = 20;

struct FsdpCase {
  std::string name;
  std::string text;  // for Python
  ShardFn<GPT2> shard;
};

FsdpCase sharded(const std::string& name, bool reshard) {
  return {name, c10::str("api=fully_shard reshard=", reshard ? 1 : 0),
          fully_sharded<GPT2>("dp=2", {.reshard_after_forward = reshard})};
}
FsdpCase flat(ShardingStrategy strategy) {
  return {c10::str(strategy), c10::str("api=fsdp strategy=", strategy),
          flat_sharded<GPT2>("dp=2", {.sharding_strategy = strategy, .use_orig_params = true})};
}
const FsdpCase kFsdpCases[] = {sharded("fully_shard", true), sharded("fully_shard, kept", false),
                               flat(ShardingStrategy::FullShard), flat(ShardingStrategy::ShardGradOp)};

// {"all_gather", 3}: by kind, since an all-gather has several names.
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
void expect_no_more(const Counts& ours, const std::string& text) {
  Counts theirs;
  models::read_counts(text, [&](const std::string& name, int64_t count) { add(theirs, name, count); });
  for (const auto& [kind, count] : ours) EXPECT_LE(count, theirs[kind]) << kind;
  EXPECT_FALSE(theirs.empty());  // PyTorch's collectives were counted
}

// By name. Inside SummonFullParams parameters are plain.
std::map<std::string, at::Tensor> full_tensors(GPT2& model, at::Tensor (*pick)(const at::Tensor&)) {
  std::map<std::string, at::Tensor> found;
  for (const auto& item : model->named_parameters()) found[item.key()] = full_tensor(pick(item.value())).clone();
  return found;
}
at::Tensor gradient_of(const at::Tensor& p) { return p.grad(); }
at::Tensor value_of(const at::Tensor& p) { return p.detach(); }

TEST(FsdpParity, TrainsLikePyTorch) {
  torch::manual_seed(7);
  GPT2 start(kTinyGPT2);
  fill_uniform(*start);
  Message request;
  request.texts["model"] = models::settings(kTinyGPT2);
  for (const auto& c : kFsdpCases) request.texts[c.name] = c.text;
  const auto tokens = torch::randint(kVocabulary, {kFsdpRanks, 2, 7}, torch::kLong);
  const auto targets = torch::randint(kVocabulary, {kFsdpRanks, 2, 7}, torch::kLong);
  request.tensors = {{"tokens", tokens}, {"targets", targets}};
  for (const auto& [key, t] : state_dict(*start)) request.tensors["model/weights/" + key] = t.clone();
  const Response response = parity::run_python("fsdp.py", request);
  SKIP_WITHOUT_PYTHON(response);

  for (const auto& c : kFsdpCases)
    run_ranks(kFsdpRanks, [&](Rank& me) {
      SCOPED_TRACE(c10::str(c.name, ", rank ", me.rank));
      const auto theirs = [&](const std::string& name) { return c10::str(c.name, "/", me.rank, "/", name); };
      auto model = clone(start);
      c.shard(model, me);
      const bool distributed = is_dtensor(model->parameters()[0]);
      optim::AdamW optimizer(model->parameters(), {.lr = 0.01, .eps = 1e-5, .weight_decay = 0.01});
      std::vector<at::Tensor> losses;
      for (int64_t step = 0; step < kFsdpSteps; step++) {
        optimizer.zero_grad();
        CommDebugMode mode;
        const auto loss = models::loss(model(tokens[me.rank]), targets[me.rank]);
        const auto forward = counted(mode);
        loss.backward();
        const auto backward = counted(mode);
        if (step == 1) {
          expect_no_more(forward, response.texts.at(theirs("forward")));
          expect_no_more(backward, response.texts.at(theirs("backward")));
        }
        if (step == 0 && distributed) {
          for (const auto& [name, grad] : full_tensors(model, gradient_of))
            EXPECT_EQ(close(grad, response.tensors.at(theirs("grads/" + name)), {1e-5, 1e-6}), "") << name;
        }
        optimizer.step();
        losses.push_back(loss.detach());
      }
      EXPECT_EQ(close(torch::stack(losses), response.tensors.at(theirs("losses")), {0, 1e-5}), "");
      const SummonFullParams summoned(*model);
      for (const auto& [name, value] : full_tensors(model, value_of))
        EXPECT_EQ(close(value, response.tensors.at(theirs("parameters/" + name)), {1e-4, 1e-4}), "") << name;
    });
}

}  // namespace
}  // namespace tessera
