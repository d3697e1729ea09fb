#include "tessera/pipelining/detail/check_table.h"

#include "tessera/base/error.h"

#include <map>

namespace tessera::pipelining {
namespace {

// What a rank has done for one microbatch in one stage.
struct MicrobatchState {
  size_t rank = 0;
  bool forward = false, input = false, weight = false;  // computed so far
};

void record(MicrobatchState& state, const Action& action) {
  const auto require = [&](bool holds, const char* what) {
    TESSERA_CHECK(holds, UsageError, "the pipeline schedule has ", action, " of rank ", state.rank, ' ', what);
  };
  switch (action.type) {
    case ActionType::Forward:
      require(!state.forward, "twice");
      state.forward = true;
      return;
    case ActionType::FullBackward:
      require(state.forward, "before its forward");
      require(!state.input && !state.weight, "although a backward of this microbatch came before");
      state.input = state.weight = true;
      return;
    case ActionType::BackwardInput:
      require(state.forward, "before its forward");
      require(!state.input, "although a backward of this microbatch came before");
      state.input = true;
      return;
    case ActionType::BackwardWeight:
      require(state.input, "before the gradient of its input (I)");
      require(!state.weight, "although the gradients of the weights are computed already");
      state.weight = true;
      return;
    default:
      TESSERA_FAIL(UsageError, "the pipeline schedule has ", action,
                   ". Write compute actions only (F, I, W, B and their overlap); communication is added");
  }
}

}  // namespace

void check_compute_table(const ActionTable& table, const TableShape& shape) {
  TESSERA_CHECK(static_cast<int64_t>(table.size()) == shape.ranks, UsageError, "the pipeline schedule has ",
                table.size(), " lines for ", shape.ranks, " ranks. Write one line per rank");
  std::map<std::pair<int64_t, int64_t>, MicrobatchState> states;  // by stage and microbatch
  std::map<int64_t, size_t> rank_of;                              // by stage
  for (size_t rank = 0; rank < table.size(); ++rank)
    for (const std::optional<Action>& entry : table[rank]) {
      if (!entry) continue;
      for (const Action& action : parts_of(*entry)) {
        TESSERA_CHECK(action.stage >= 0 && action.stage < shape.stages && action.microbatch &&
                          *action.microbatch >= 0 && *action.microbatch < shape.microbatches,
                      UsageError, "the pipeline schedule has ", action, " of rank ", rank, ", and there are ",
                      shape.stages, " stages and ", shape.microbatches, " microbatches. Both count from 0");
        const size_t owner = rank_of.emplace(action.stage, rank).first->second;
        TESSERA_CHECK(owner == rank, UsageError, "the pipeline schedule has ", action, " of rank ", rank, ", and rank ",
                      owner, " has stage ", action.stage, " too. Write each stage on one rank");
        MicrobatchState& state = states[{action.stage, *action.microbatch}];
        state.rank = rank;
        record(state, action);
      }
    }
  for (int64_t stage = 0; stage < shape.stages; ++stage)
    for (int64_t microbatch = 0; microbatch < shape.microbatches; ++microbatch) {
      const MicrobatchState& state = states[{stage, microbatch}];
      const char* missing = !state.forward ? "F" : !state.input ? "B" : !state.weight ? "W" : nullptr;
      TESSERA_CHECK(!missing, UsageError, "the pipeline schedule has no ", stage, missing, microbatch,
                    ". Each stage needs F and B, or F, I and W, for each microbatch");
    }
}

std::vector<int64_t> stage_ranks_of(const ActionTable& table, int64_t stages) {
  std::vector<int64_t> ranks(stages, 0);
  for (size_t rank = 0; rank < table.size(); ++rank)
    for (const std::optional<Action>& entry : table[rank]) {
      if (!entry) continue;
      for (const Action& action : parts_of(*entry)) ranks[action.stage] = static_cast<int64_t>(rank);
    }
  return ranks;
}

}  // namespace tessera::pipelining
