#include "tessera/pipelining/detail/lowering.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "tessera/base/error.h"

namespace tessera::pipelining {
namespace {

// The next stages that `actions` use from `begin` on, without repetition: `count`, or one more if the last action is an
// overlapped one.
std::vector<int64_t> next_stages(const RankActions& actions, size_t begin, size_t count) {
  std::vector<int64_t> stages;
  for (size_t i = begin; i < actions.size() && stages.size() < count; ++i) {
    if (!actions[i]) continue;
    for (const Action& part : parts_of(*actions[i]))
      if (std::ranges::find(stages, part.stage) == stages.end()) stages.push_back(part.stage);
  }
  return stages;
}

bool is_backward(ActionType type) { return type == ActionType::BackwardInput || type == ActionType::FullBackward; }

// Sends and receives of one pipeline.
class SendRecv {
 public:
  SendRecv(const ActionTable& table, const std::vector<int64_t>& stage_ranks)
      : table_(table),
        rank_of_(stage_ranks),
        last_stage_(static_cast<int64_t>(stage_ranks.size()) - 1),
        result_(table.size()),
        done_(table.size()) {}

  ActionTable run() {
    std::vector<size_t> next(table_.size(), 0);
    for (bool progress = true; progress;) {
      progress = false;
      for (size_t rank = 0; rank < table_.size(); ++rank) {
        if (next[rank] == table_[rank].size()) continue;
        const std::optional<Action>& action = table_[rank][next[rank]];
        if (action && !ready(*action, rank)) continue;
        if (action) add(*action, rank);
        ++next[rank];
        progress = true;
      }
    }
    for (size_t rank = 0; rank < table_.size(); ++rank)
      TESSERA_CHECK(next[rank] == table_[rank].size(), UsageError, "the pipeline schedule cannot run: rank ", rank,
                    " waits for ever for the input of ", *table_[rank][next[rank]], ", its action ", next[rank]);
    return std::move(result_);
  }

 private:
  using Key = std::tuple<int64_t, ActionType, std::optional<int64_t>>;
  bool done(size_t rank, int64_t stage, ActionType type, const Action& of) const {
    return done_[rank].contains({stage, type, of.microbatch});
  }
  // The rank itself has received the input, or has computed it.
  bool ready(const Action& action, size_t rank) const {
    return std::ranges::all_of(parts_of(action), [&](const Action& part) {
      if (part.type == ActionType::Forward && part.stage > 0)
        return done(rank, part.stage, ActionType::RecvForward, part) || done(rank, part.stage - 1, part.type, part);
      if (is_backward(part.type) && part.stage < last_stage_)
        return done(rank, part.stage, ActionType::RecvBackward, part) ||
               done(rank, part.stage + 1, ActionType::BackwardInput, part) ||
               done(rank, part.stage + 1, ActionType::FullBackward, part);
      return true;
    });
  }
  void add(const Action& action, size_t rank) {
    result_[rank].emplace_back(action);
    for (const Action& part : parts_of(action)) {
      done_[rank].insert({part.stage, part.type, part.microbatch});
      const bool forward = part.type == ActionType::Forward;
      if (!forward && !is_backward(part.type)) continue;
      const int64_t peer_stage = forward ? part.stage + 1 : part.stage - 1;
      if (peer_stage < 0 || peer_stage > last_stage_ || rank_of_[peer_stage] == rank_of_[part.stage]) continue;
      put(rank, {part.stage, forward ? ActionType::SendForward : ActionType::SendBackward, part.microbatch, {}});
      put(rank_of_[peer_stage],
          {peer_stage, forward ? ActionType::RecvForward : ActionType::RecvBackward, part.microbatch, {}});
    }
  }
  void put(size_t rank, const Action& action) {
    result_[rank].emplace_back(action);
    done_[rank].insert({action.stage, action.type, action.microbatch});
  }

  const ActionTable& table_;
  const std::vector<int64_t>& rank_of_;
  const int64_t last_stage_;
  ActionTable result_;
  std::vector<std::set<Key>> done_;
};

}  // namespace

RankActions add_unshard_reshard(const RankActions& actions, size_t active) {
  RankActions result;
  std::set<int64_t> unsharded;
  const auto add = [&](int64_t stage, ActionType type) { result.emplace_back(Action{stage, type, std::nullopt, {}}); };
  for (size_t i = 0; i < actions.size(); ++i) {
    if (!actions[i]) continue;
    const std::vector<int64_t> needed = next_stages(actions, i, active);
    std::erase_if(unsharded, [&](int64_t stage) {
      const bool leaves = std::ranges::find(needed, stage) == needed.end();
      if (leaves) add(stage, ActionType::Reshard);
      return leaves;
    });
    for (const int64_t stage : needed)
      if (unsharded.insert(stage).second) add(stage, ActionType::Unshard);
    result.push_back(actions[i]);
  }
  for (const int64_t stage : unsharded) add(stage, ActionType::Reshard);
  return result;
}

RankActions add_reduce_grad(const RankActions& actions, int64_t microbatches) {
  RankActions result;
  std::map<int64_t, int64_t> backwards;  // of a stage
  for (const std::optional<Action>& action : actions) {
    if (!action) continue;
    result.push_back(action);
    for (const Action& part : parts_of(*action)) {
      if (part.type != ActionType::BackwardWeight && part.type != ActionType::FullBackward) continue;
      if (++backwards[part.stage] == microbatches)
        result.emplace_back(Action{part.stage, ActionType::ReduceGrad, std::nullopt, {}});
    }
  }
  return result;
}

ActionTable add_send_recv(const ActionTable& table, const std::vector<int64_t>& stage_ranks) {
  return SendRecv(table, stage_ranks).run();
}

ActionTable lower_schedule(const ActionTable& compute, const std::vector<int64_t>& stage_ranks, int64_t microbatches) {
  ActionTable table;
  for (const RankActions& row : compute) table.push_back(add_reduce_grad(add_unshard_reshard(row), microbatches));
  return add_send_recv(table, stage_ranks);
}

}  // namespace tessera::pipelining
