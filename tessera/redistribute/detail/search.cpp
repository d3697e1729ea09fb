#include "tessera/redistribute/detail/search.h"

#include "tessera/base/error.h"
#include "tessera/redistribute/detail/cost.h"
#include "tessera/redistribute/detail/transition.h"

#include <algorithm>
#include <limits>
#include <queue>

// A state gives each axis one of its options: R, S(d) for each dim longer than 1, and the axis's placements in `from`
// and `to`. An edge is one step. A plan is a shortest path, so it can contain steps that look like a detour:
//
//   [P, R] -> [R, R] of a large tensor on 8x8:  slice on axis 1, all_reduce an eighth on axis 0, all_gather on axis 1
namespace tessera::redistribute::detail {
namespace {

using State = uint32_t;  // one digit per axis: its option; axis 0 is the lowest digit
constexpr State kNowhere = std::numeric_limits<State>::max();

struct Axis {
  Placements options;
  State stride;  // of its digit
};

struct Reached {
  double cost = std::numeric_limits<double>::infinity();
  State before = kNowhere;
  PlanStep step{};
  bool settled = false;
};

class Search {
 public:
  explicit Search(const Problem& problem) : problem_(problem) {
    State states = 1;
    for (size_t a = 0; a < problem.from.size(); a++) {
      axes_.push_back({options_of(a), states});
      states *= static_cast<State>(axes_.back().options.size());
      TESSERA_CHECK(states < (1u << 22), UsageError, "redistributing over ", problem.from.size(), " mesh axes from ",
                    to_string(problem.from), " to ", to_string(problem.to), " has too many states to search;",
                    " redistribute over fewer axes at a time");
    }
    reached_.resize(states);
  }

  std::unique_ptr<Plan> run() {
    State start = number_of(problem_.from), goal = number_of(problem_.to);
    reached_[start].cost = 0;
    queue_.push({0, start});
    while (!queue_.empty()) {
      auto [cost, state] = queue_.top();
      queue_.pop();
      if (state == goal) return read_plan(goal);
      if (std::exchange(reached_[state].settled, true)) continue;
      try_steps(state);
    }
    return nullptr;
  }

 private:
  using Queued = std::pair<double, State>;

  Placements options_of(size_t axis) const {
    Placements options{Replicate()};
    auto add = [&](const Placement& p) {
      if (std::find(options.begin(), options.end(), p) == options.end()) options.push_back(p);
    };
    for (size_t d = 0; d < problem_.sizes.size(); d++)
      if (problem_.sizes[d] > 1) add(Shard(static_cast<int64_t>(d)));
    add(problem_.from[axis]);
    add(problem_.to[axis]);
    return options;
  }

  State number_of(PlacementsRef placements) const {
    State state = 0;
    for (size_t a = 0; a < axes_.size(); a++) {
      const auto& options = axes_[a].options;
      state += axes_[a].stride *
               static_cast<State>(std::find(options.begin(), options.end(), placements[a]) - options.begin());
    }
    return state;
  }

  State digit(State state, size_t axis) const {
    return state / axes_[axis].stride % static_cast<State>(axes_[axis].options.size());
  }

  Placements placements_of(State state) const {
    Placements placements;
    for (size_t a = 0; a < axes_.size(); a++) placements.push_back(axes_[a].options[digit(state, a)]);
    return placements;
  }

  void try_steps(State state) {
    here_ = placements_of(state);
    bytes_ = largest_local_bytes(problem_, here_);
    there_ = here_;
    for (size_t a = 0; a < axes_.size(); a++) {
      const auto& [options, stride] = axes_[a];
      if (problem_.mesh_shape[a] > 1 && here_[a].is_sharded() &&
          !is_last_shard(here_, problem_.mesh_shape, static_cast<int64_t>(a)))
        continue;
      for (State digit_there = 0; digit_there < options.size(); digit_there++) {
        if (options[digit_there] == here_[a]) continue;
        // A partial is made only on an axis that starts as R, never from a partial that the plan reduced.
        if (options[digit_there].is_partial() && !problem_.from[a].is_replicate()) continue;
        there_[a] = options[digit_there];
        auto move = legal_move(here_, there_, problem_.mesh_shape, static_cast<int64_t>(a));
        if (move) offer(state, state + (digit_there - digit(state, a)) * stride, *move, {static_cast<int64_t>(a)});
      }
      there_[a] = here_[a];
    }
    try_joint_reductions(state);
  }

  // One all-reduce can reduce partials of one kind over several axes.
  void try_joint_reductions(State state) {
    for (uint32_t mask = 3; mask < (1u << axes_.size()); mask++) {
      c10::SmallVector<int64_t, 4> axes;
      bool alike = true;
      State there = state;
      for (size_t a = 0; a < axes_.size(); a++) {
        if (!(mask >> a & 1)) continue;
        axes.push_back(static_cast<int64_t>(a));
        alike &= problem_.mesh_shape[a] > 1 && here_[a].is_partial() && here_[a] == here_[axes[0]] &&
                 is_last_reduction(here_, static_cast<int64_t>(a));
        there -= digit(state, a) * axes_[a].stride;  // R is option 0
      }
      if (alike && axes.size() > 1) offer(state, there, Move::AllReduce, axes);
    }
  }

  void offer(State from, State to, Move move, c10::IntArrayRef axes) {
    int64_t ranks = 1;
    for (auto a : axes) ranks *= problem_.mesh_shape[a];
    double cost = reached_[from].cost + step_cost(move, ranks, bytes_);
    auto& reached = reached_[to];
    if (cost >= reached.cost) return;
    auto axis = static_cast<size_t>(axes[0]);
    reached.cost = cost;
    reached.before = from;
    reached.step = {.move = move,
                    .axes = {axes.begin(), axes.end()},
                    .from = here_[axis],
                    .to = axes_[axis].options[digit(to, axis)],
                    .bytes = wire_bytes(move, ranks, bytes_)};
    queue_.push({cost, to});
  }

  std::unique_ptr<Plan> read_plan(State goal) const {
    auto plan = std::make_unique<Plan>();
    plan->cost = reached_[goal].cost;
    for (State s = goal; reached_[s].before != kNowhere; s = reached_[s].before)
      plan->steps.push_back(reached_[s].step);
    std::reverse(plan->steps.begin(), plan->steps.end());
    return plan;
  }

  const Problem& problem_;
  c10::SmallVector<Axis, 4> axes_;
  std::vector<Reached> reached_;
  std::priority_queue<Queued, std::vector<Queued>, std::greater<>> queue_;
  Placements here_, there_;  // placements before and after the step that is tried
  double bytes_ = 0;         // local bytes before it
};

}  // namespace

std::unique_ptr<Plan> search(const Problem& problem) { return Search(problem).run(); }

}  // namespace tessera::redistribute::detail
