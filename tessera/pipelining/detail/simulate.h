#pragma once
#include <string>
#include <vector>

#include "tessera/pipelining/detail/action_table.h"

// How long a schedule takes and how much it keeps, from the costs of its stages, without running it.
namespace tessera::pipelining {

// Of one microbatch.
struct StageCost {
  double forward = 1;          // seconds
  double backward_input = 1;   // seconds
  double backward_weight = 1;  // seconds
  double send = 0;             // seconds from SEND to RECV
  double activation = 1;       // bytes that are kept from the forward until the gradients of the weights are computed

  bool operator==(const StageCost&) const = default;
};

struct TimedAction {
  Action action;
  double begin = 0;
  double end = 0;
};

struct RankTimeline {
  std::vector<TimedAction> actions;  // compute actions only
  double busy = 0;                   // seconds of compute
  double peak = 0;                   // bytes of kept activations
};

struct Simulation {
  double seconds = 0;
  std::vector<RankTimeline> ranks;

  // The share of all ranks' time in which they do not compute.
  double bubble() const;
};

// `table` has communication (lower_schedule). A SEND and a RECV cost their ranks nothing; the action
// that uses the data waits for it. Parts of an overlapped action run one after the other. Throws UsageError that names
// what waits for what if ranks wait for ever.
Simulation simulate(const ActionTable& table, const std::vector<StageCost>& stages);

// A drawing of the simulation: one row per rank, one box per action.
std::string to_svg(const Simulation& simulation);

}  // namespace tessera::pipelining
