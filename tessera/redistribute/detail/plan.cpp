#include "tessera/redistribute/detail/plan.h"

#include "tessera/base/error.h"
#include "tessera/redistribute/detail/cost.h"
#include "tessera/redistribute/detail/search.h"
#include "tessera/redistribute/detail/transition.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>

namespace tessera::redistribute {

const char* to_string(Move move) {
  constexpr std::array kNames = {"nothing",    "slice",          "divide",    "all_gather",
                                 "all_reduce", "reduce_scatter", "all_to_all"};  // in the order of the enum
  return kNames[static_cast<size_t>(move)];
}

bool communicates(Move move) { return move >= Move::AllGather; }

bool Plan::communicates() const { return collectives() > 0; }

bool Plan::only_relabels() const {
  return std::all_of(steps.begin(), steps.end(), [](const PlanStep& step) { return step.move == Move::Nothing; });
}

int Plan::collectives() const {
  return static_cast<int>(std::count_if(steps.begin(), steps.end(),
                                        [](const PlanStep& step) { return redistribute::communicates(step.move); }));
}

std::string to_string(const Plan& plan, c10::ArrayRef<std::string> axis_names) {
  if (plan.steps.empty()) return "nothing";
  std::string text;
  for (const auto& step : plan.steps) {
    if (!text.empty()) text += "; ";
    for (size_t i = 0; i < step.axes.size(); i++) {
      auto axis = static_cast<size_t>(step.axes[i]);
      text += (i ? "+" : "") + (axis < axis_names.size() ? axis_names[axis] : c10::str("axis ", axis));
    }
    text += c10::str(": ", to_string(step.move), " ", step.from, "->", step.to);
    if (communicates(step.move)) text += c10::str(" ", std::llround(step.bytes), " B");
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const Plan& plan) { return out << to_string(plan); }

namespace {

void check(const Problem& problem) {
  TESSERA_CHECK(problem.from.size() == problem.mesh_shape.size() && problem.to.size() == problem.mesh_shape.size(),
                UsageError, "a mesh of ", problem.mesh_shape.size(), " axes, but placements ", to_string(problem.from),
                " -> ", to_string(problem.to), "; give one placement per mesh axis");
  TESSERA_CHECK(problem.mesh_shape.size() <= 16, UsageError, "a mesh of ", problem.mesh_shape.size(), " axes");
}

// A partial cannot be made from shards or from a partial of another kind. (A detour over R is possible, but the caller
// did not ask for its cost.)
bool is_forbidden(const Placement& from, const Placement& to) {
  return to.is_partial() && !detail::direct_move(from, to);
}

std::unique_ptr<Plan> plan_of(PlanStep step, double cost) {
  auto plan = std::make_unique<Plan>();
  plan->steps.push_back(std::move(step));
  plan->cost = cost;
  return plan;
}

// A plan of one move, for placements that differ on one axis. Any other plan needs at least two collectives (one to
// change another axis and one to change it back), or more steps without a gain. Null: a search is needed.
std::unique_ptr<Plan> try_one_step(const Problem& problem, int64_t axis) {
  auto move = detail::legal_move(problem.from, problem.to, problem.mesh_shape, axis);
  if (!move) return nullptr;
  auto step = detail::make_step(problem, *move, axis, problem.from, problem.to[axis]);
  auto cost = detail::cost_of(problem, step, problem.from);
  bool surely_cheapest = problem.mesh_shape.size() == 1 || !communicates(*move) || cost <= 2 * cost_model().latency;
  return surely_cheapest ? plan_of(std::move(step), cost) : nullptr;
}

// A plan that slices or relabels every axis that differs, from left to right. Slices come first, because they leave
// less data to divide. Null: a search is needed.
std::unique_ptr<Plan> try_without_communication(const Problem& problem) {
  auto plan = std::make_unique<Plan>();
  auto here = problem.from, there = here;
  for (bool slices : {true, false})
    for (size_t a = 0; a < here.size(); a++) {
      if (here[a] == problem.to[a] || problem.to[a].is_sharded() != slices) continue;
      there[a] = problem.to[a];
      auto move = detail::legal_move(here, there, problem.mesh_shape, static_cast<int64_t>(a));
      if (!move || communicates(*move)) return nullptr;
      plan->steps.push_back(detail::make_step(problem, *move, static_cast<int64_t>(a), here, there[a]));
      plan->cost += detail::cost_of(problem, plan->steps.back(), here);
      here = there;
    }
  return plan;
}

}  // namespace

std::unique_ptr<Plan> try_plan(const Problem& problem) {
  check(problem);
  int64_t differing = 0, last = 0;
  for (size_t a = 0; a < problem.from.size(); a++) {
    if (problem.from[a] == problem.to[a]) continue;
    if (is_forbidden(problem.from[a], problem.to[a])) return nullptr;
    differing++;
    last = static_cast<int64_t>(a);
  }
  if (differing == 0) return std::make_unique<Plan>();
  if (differing == 1)
    if (auto plan = try_one_step(problem, last)) return plan;
  if (auto plan = try_without_communication(problem)) return plan;
  return detail::search(problem);
}

Plan make_plan(const Problem& problem) {
  if (auto plan = try_plan(problem)) return std::move(*plan);
  for (size_t a = 0; a < problem.from.size(); a++)
    if (is_forbidden(problem.from[a], problem.to[a]))
      TESSERA_FAIL(ShardingError, "redistribute ", to_string(problem.from), " -> ", to_string(problem.to),
                   ": on mesh axis ", a, " ", problem.from[a], " cannot become ", problem.to[a],
                   ", which can only be made from R; redistribute to R on that axis first, or keep ", problem.from[a]);
  TESSERA_FAIL(ShardingError, "redistribute ", to_string(problem.from), " -> ", to_string(problem.to),
               ": there is no sequence of moves between them; redistribute to R on every axis first");
}

}  // namespace tessera::redistribute
