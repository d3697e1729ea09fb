#pragma once
#include "tessera/redistribute/detail/plan.h"

// The cost model, in microseconds. The choice of a strategy (propagate/) and the choice of a plan use the same model.
// The figures are orders of magnitude for a CPU mesh. Only their ratios matter.
namespace tessera::redistribute {

struct CostModel {
  double latency = 20;               // to start a collective
  double bytes_per_us = 4'000;       // that a rank sends
  double copy_bytes_per_us = 8'000;  // local copies: slices, packing
  double flops_per_us = 20'000;      // local compute of a strategy
};
const CostModel& cost_model();

// Cost of one step, and the bytes that each rank sends. `local_bytes`: size of the local tensor before the step.
double step_cost(Move move, int64_t ranks, double local_bytes);
double wire_bytes(Move move, int64_t ranks, double local_bytes);

}  // namespace tessera::redistribute
