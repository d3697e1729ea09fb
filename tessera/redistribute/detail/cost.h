#pragma once
#include "tessera/redistribute/detail/plan.h"

// One model prices everything: what a redistribution costs when a row is chosen, and what the chosen plan is made of.
// Microseconds. The figures are orders of magnitude for a CPU mesh; only their ratios decide anything.
namespace tessera::redistribute {

struct CostModel {
  double latency = 20;               // of starting any collective
  double bytes_per_us = 4'000;       // wire, per rank
  double copy_bytes_per_us = 8'000;  // local copies: slices, packing
  double flops_per_us = 20'000;      // compute that a choice implies
};
const CostModel& cost_model();

// Of one step; bytes: of the local tensor before it.
double step_cost(Move move, int64_t ranks, double local_bytes);
double wire_bytes(Move move, int64_t ranks, double local_bytes);

}  // namespace tessera::redistribute
