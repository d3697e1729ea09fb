#pragma once
#include "tessera/comm/world.h"
#include "tessera/train/config.h"

#include <iosfwd>
#include <vector>

// How far a run with default numerics is from the same run with invariant numerics, and how far it is predicted to be
// (docs/design/numerics.md). `tessera train --compare-numerics N`.
namespace tessera::train {

struct DriftStep {
  int64_t step = 0;
  double loss = 0, invariant_loss = 0, loss_bound = 0;  // the bound: of their difference
  double weights = 0, weights_bound = 0;                // norm of the difference after the step / norm of the weights
};

struct DriftReport {
  double rounding = 0;  // assumed relative error of a gradient
  std::vector<DriftStep> steps;
};
std::ostream& operator<<(std::ostream& out, const DriftReport& report);

// Trains three models for the first steps of the run: with default numerics, with invariant ones, and with invariant
// ones and gradients that are wrong by `rounding`. Every rank of the world calls it. Throws UsageError if the config
// has no invariant form.
DriftReport measure_drift(const TrainConfig& config, const World& world, int64_t steps);

}  // namespace tessera::train
