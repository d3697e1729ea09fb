#include "tessera/pipelining/detail/schedules.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <deque>
#include <map>
#include <set>

#include "tessera/base/error.h"

namespace tessera::pipelining {
namespace {

constexpr auto F = ActionType::Forward;
constexpr auto I = ActionType::BackwardInput;
constexpr auto W = ActionType::BackwardWeight;
constexpr auto B = ActionType::FullBackward;

// Builds the actions of one rank. Microbatches of a stage are numbered in the order in which they are added.
class RankSchedule {
 public:
  void wait(int64_t steps = 1) {
    for (int64_t i = 0; i < steps; ++i) actions_.emplace_back();
  }
  void add(int64_t stage, ActionType type) { actions_.emplace_back(next(stage, type)); }
  void add_microbatch(int64_t stage, ActionType type, int64_t microbatch) {
    actions_.emplace_back(Action{stage, type, microbatch, {}});
  }
  void add_overlapped(int64_t forward_stage, int64_t backward_stage) {
    const Action forward = next(forward_stage, F);
    actions_.emplace_back(
        Action{-1, ActionType::OverlapForwardBackward, std::nullopt, {forward, next(backward_stage, B)}});
  }
  int64_t count(int64_t stage, ActionType type) { return counts_[{stage, counted_as(type)}]; }
  RankActions take() { return std::move(actions_); }

 private:
  static ActionType counted_as(ActionType type) { return type == B ? I : type; }
  Action next(int64_t stage, ActionType type) {
    if (type == B) ++counts_[{stage, W}];  // a full backward computes the gradients of the weights too
    return {stage, type, counts_[{stage, counted_as(type)}]++, {}};
  }

  RankActions actions_;
  std::map<std::pair<int64_t, ActionType>, int64_t> counts_;
};

RankActions gpipe(const PipelineShape& shape, int64_t rank) {
  RankSchedule schedule;
  for (int64_t i = 0; i < shape.microbatches; ++i) schedule.add(rank, F);
  for (int64_t i = 0; i < shape.microbatches; ++i) schedule.add(rank, B);
  return schedule.take();
}

// Warm-up forwards until the last stage is reached, then one forward and one backward in turn.
RankActions one_f_one_b(const PipelineShape& shape, int64_t rank) {
  RankSchedule schedule;
  const int64_t warmup = std::min(shape.ranks - 1 - rank, shape.microbatches);
  for (int64_t i = 0; i < warmup; ++i) schedule.add(rank, F);
  for (int64_t i = warmup; i < shape.microbatches; ++i) {
    schedule.add(rank, F);
    schedule.add(rank, B);
  }
  for (int64_t i = 0; i < warmup; ++i) schedule.add(rank, B);
  return schedule.take();
}

// All microbatches through each local stage, then back.
RankActions looped_bfs(const PipelineShape& shape, int64_t rank) {
  RankSchedule schedule;
  schedule.wait(rank);
  for (int64_t local = 0; local < shape.stages_per_rank; ++local)
    for (int64_t i = 0; i < shape.microbatches; ++i) schedule.add(local * shape.ranks + rank, F);
  schedule.wait(2 * (shape.ranks - 1 - rank));  // until the first backward has come up
  for (int64_t local = shape.stages_per_rank - 1; local >= 0; --local)
    for (int64_t i = shape.microbatches - 1; i >= 0; --i) schedule.add_microbatch(local * shape.ranks + rank, B, i);
  return schedule.take();
}

// Microbatches go through the local stages in rounds: a round of microbatches through one stage, then through the next.
int64_t microbatches_per_round(const PipelineShape& shape) {
  return shape.microbatches / std::max<int64_t>(1, shape.microbatches / shape.ranks);
}

// Interleaved 1F1B. With `zero_bubble`, a backward is split: gradients of the weights fill the waiting times.
RankActions interleaved(const PipelineShape& shape, int64_t rank, bool zero_bubble) {
  const int64_t round = microbatches_per_round(shape);
  const int64_t all = shape.stages_per_rank * shape.microbatches;
  const int64_t hops = shape.ranks - 1 - rank;  // to the last rank
  const int64_t warmup = std::min((shape.stages_per_rank - 1) * round + (zero_bubble ? 1 : 2) * hops, all);
  const auto forward_stage = [&](int64_t i) { return (i / round) % shape.stages_per_rank * shape.ranks + rank; };
  const auto backward_stage = [&](int64_t i) {
    return (shape.stages_per_rank - 1 - (i / round) % shape.stages_per_rank) * shape.ranks + rank;
  };

  RankSchedule schedule;
  schedule.wait(rank);
  for (int64_t i = 0; i < warmup; ++i) schedule.add(forward_stage(i), F);
  if (warmup > 0) schedule.wait(zero_bubble ? hops : shape.stages() + 2 * hops - (warmup + rank));
  int64_t weights = 0;
  for (int64_t i = 0; i < all; ++i) {
    if (warmup + i < all)
      schedule.add(forward_stage(warmup + i), F);
    else if (!zero_bubble)
      schedule.wait();
    schedule.add(backward_stage(i), zero_bubble ? I : B);
    if (zero_bubble && i >= rank) schedule.add(backward_stage(weights++), W);
  }
  for (; zero_bubble && weights < all; ++weights) schedule.add(backward_stage(weights), W);
  return schedule.take();
}

// Delays each forward until the stage before has computed its input.
ActionTable wait_for_inputs(const ActionTable& table) {
  ActionTable result(table.size());
  std::vector<size_t> next(table.size(), 0);
  std::set<std::pair<int64_t, int64_t>> done;  // forwards: stage and microbatch
  for (bool more = true; more;) {
    more = false;
    std::vector<std::pair<int64_t, int64_t>> now;
    for (size_t rank = 0; rank < table.size(); ++rank) {
      if (next[rank] == table[rank].size()) continue;
      more = true;
      const std::optional<Action>& action = table[rank][next[rank]];
      const bool forward = action && action->type == F;
      if (forward && action->stage > 0 && !done.contains({action->stage - 1, *action->microbatch})) {
        result[rank].emplace_back();
        continue;
      }
      if (forward) now.emplace_back(action->stage, *action->microbatch);
      result[rank].push_back(action);
      ++next[rank];
    }
    done.insert(now.begin(), now.end());
  }
  return result;
}

// Zero bubble, V-shaped: rank r has the stages r and 2 * ranks - 1 - r, so its last stage is the first to go back.
RankActions zbv(const PipelineShape& shape, int64_t rank) {
  const int64_t ranks = shape.ranks;
  const int64_t first = rank;
  const int64_t second = 2 * ranks - 1 - rank;
  const int64_t microbatches = std::max(2 * ranks - 1, shape.microbatches);  // as many as fill the pipeline
  RankSchedule schedule;
  const auto backward = [&](int64_t stage) {
    schedule.add(stage, I);
    schedule.add(stage, W);
  };
  schedule.wait(rank);
  for (int64_t i = 0; i < 2 * (ranks - rank) - 1; ++i) schedule.add(first, F);
  for (int64_t i = 0; i < rank; ++i) {
    schedule.add(second, F);
    schedule.add(first, F);
  }
  for (int64_t i = 0; i < ranks - rank; ++i) {
    schedule.add(second, F);
    backward(second);
  }
  while (schedule.count(second, F) < schedule.count(first, F) || schedule.count(first, F) < microbatches) {
    if (schedule.count(first, F) < microbatches) schedule.add(first, F);
    backward(first);
    schedule.add(second, F);
    backward(second);
  }
  for (int64_t i = 0; i < rank; ++i) {
    schedule.add(first, I);
    schedule.add(second, I);
  }
  for (int64_t i = 0; i < ranks - rank; ++i) backward(first);
  for (const int64_t stage : {second, first})
    while (schedule.count(stage, W) < schedule.count(stage, I)) schedule.add(stage, W);

  RankActions actions = schedule.take();
  for (std::optional<Action>& action : actions)
    if (action && *action->microbatch >= shape.microbatches) action.reset();
  return actions;
}

// DeepSeek's DualPipe in the shape of a V: the forward of one stage overlaps the backward of the other.
RankActions dual_pipe_v(const PipelineShape& shape, int64_t rank) {
  const int64_t hops = shape.ranks - 1 - rank;
  const int64_t first = rank;
  const int64_t second = 2 * shape.ranks - 1 - rank;
  RankSchedule schedule;
  std::deque<std::pair<int64_t, int64_t>> weights;  // stage and microbatch whose weight gradients are due
  const auto backward_input = [&](int64_t stage) {
    weights.emplace_back(stage, schedule.count(stage, I));
    schedule.add(stage, I);
  };
  const auto backward_weight = [&] {
    if (weights.empty()) return;
    schedule.add_microbatch(weights.front().first, W, weights.front().second);
    weights.pop_front();
  };
  for (int64_t i = 0; i < 2 * hops; ++i) schedule.add(first, F);
  for (int64_t i = 0; i < rank + 1; ++i) {
    schedule.add(first, F);
    schedule.add(second, F);
  }
  for (int64_t i = 0; i < hops; ++i) {
    backward_input(second);
    backward_weight();
    schedule.add(second, F);
  }
  for (int64_t i = 0; i < shape.microbatches - 2 * shape.ranks + rank + 1; ++i) {
    if (i == 0 && hops == 0) {  // apart: the bubble is smaller
      schedule.add(first, F);
      schedule.add(second, B);
    } else {
      schedule.add_overlapped(first, second);
    }
    schedule.add_overlapped(second, first);
  }
  for (int64_t i = 0; i < hops; ++i) {
    schedule.add(second, B);
    schedule.add_overlapped(second, first);
  }
  bool split = false;  // the later backwards are split
  const auto backward = [&](int64_t stage) { split ? backward_input(stage) : schedule.add(stage, B); };
  const int64_t half = (rank + 1) / 2;
  for (int64_t i = 0; i < rank + 1; ++i) {
    split = split || (i == half && rank % 2 == 1);
    backward(second);
    split = split || (i == half && rank % 2 == 0);
    backward(first);
  }
  for (int64_t i = 0; i < hops; ++i) {
    backward_weight();
    backward(first);
  }
  for (int64_t i = 0; i < rank + 1; ++i) backward_weight();
  return schedule.take();
}

void needs_one_stage(std::string_view name, const PipelineShape& shape) {
  TESSERA_CHECK(shape.stages_per_rank == 1, UsageError, name, " has one stage per rank, and ", shape.stages_per_rank,
                " were asked for. Write Interleaved1F1B or LoopedBFS for several");
}
void needs_two_stages(std::string_view name, const PipelineShape& shape) {
  TESSERA_CHECK(shape.stages_per_rank == 2, UsageError, name, " has exactly two stages per rank, and ",
                shape.stages_per_rank, " were asked for: ", shape.ranks, " ranks need ", 2 * shape.ranks, " stages");
}
void needs_full_rounds(std::string_view name, const PipelineShape& shape) {
  const int64_t rounds = std::max<int64_t>(1, shape.microbatches / shape.ranks);
  TESSERA_CHECK(shape.microbatches % rounds == 0, UsageError, name, " runs ", shape.microbatches, " microbatches on ",
                shape.ranks, " ranks in ", rounds, " rounds, which must divide the number of microbatches. Write ",
                shape.microbatches / rounds * rounds, " or ", (shape.microbatches / rounds + 1) * rounds);
}
void needs_a_microbatch_per_stage(std::string_view name, const PipelineShape& shape) {
  needs_two_stages(name, shape);
  TESSERA_CHECK(shape.microbatches >= shape.stages(), UsageError, name,
                " needs at least as many microbatches as stages, and ", shape.microbatches, " microbatches for ",
                shape.stages(), " stages were asked for");
}
void needs_nothing(std::string_view, const PipelineShape&) {}

struct ScheduleKind {
  std::string_view name;
  void (*check)(std::string_view name, const PipelineShape&);
  RankActions (*of_rank)(const PipelineShape&, int64_t rank);
  bool waits_for_inputs = false;
  bool v_shaped = false;
};
constexpr std::array kSchedules = {
    ScheduleKind{"GPipe", needs_one_stage, gpipe},
    ScheduleKind{"1F1B", needs_one_stage, one_f_one_b},
    ScheduleKind{"Interleaved1F1B", needs_full_rounds,
                 [](const PipelineShape& shape, int64_t rank) { return interleaved(shape, rank, false); }},
    ScheduleKind{"LoopedBFS", needs_nothing, looped_bfs},
    ScheduleKind{"InterleavedZeroBubble", needs_full_rounds,
                 [](const PipelineShape& shape, int64_t rank) { return interleaved(shape, rank, true); }, true},
    ScheduleKind{"ZBVZeroBubble", needs_two_stages, zbv, false, true},
    ScheduleKind{"DualPipeV", needs_a_microbatch_per_stage, dual_pipe_v, false, true},
};

const ScheduleKind& schedule_named(std::string_view name) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  for (const ScheduleKind& kind : kSchedules)
    if (std::equal(name.begin(), name.end(), kind.name.begin(), kind.name.end(), same)) return kind;
  std::string names;
  for (const ScheduleKind& kind : kSchedules) names += (names.empty() ? "" : ", ") + std::string(kind.name);
  TESSERA_FAIL(UsageError, "pipeline schedule '", name, "' is unknown. Write one of ", names);
}

}  // namespace

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleKind& kind : kSchedules) names.emplace_back(kind.name);
  return names;
}

std::string canonical_name(std::string_view name) { return std::string(schedule_named(name).name); }

void check_schedule(std::string_view name, const PipelineShape& shape) {
  const ScheduleKind& kind = schedule_named(name);
  TESSERA_CHECK(shape.ranks >= 1 && shape.stages_per_rank >= 1 && shape.microbatches >= 1, UsageError, kind.name,
                " of ", shape.ranks, " ranks, ", shape.stages_per_rank, " stages per rank and ", shape.microbatches,
                " microbatches: each must be at least 1");
  kind.check(kind.name, shape);
}

ActionTable compute_schedule(std::string_view name, const PipelineShape& shape) {
  check_schedule(name, shape);
  const ScheduleKind& kind = schedule_named(name);
  ActionTable table;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) table.push_back(kind.of_rank(shape, rank));
  return kind.waits_for_inputs ? wait_for_inputs(table) : table;
}

std::vector<int64_t> stage_ranks(std::string_view name, const PipelineShape& shape) {
  const bool v_shaped = schedule_named(name).v_shaped;
  std::vector<int64_t> ranks;
  for (int64_t stage = 0; stage < shape.stages(); ++stage) {
    const int64_t rank = stage % shape.ranks;
    ranks.push_back(v_shaped && stage / shape.ranks % 2 == 1 ? shape.ranks - 1 - rank : rank);
  }
  return ranks;
}

}  // namespace tessera::pipelining
