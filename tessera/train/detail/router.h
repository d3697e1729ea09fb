#pragma once
#include "tessera/train/detail/metrics.h"
#include "tessera/train/detail/parallel_model.h"

namespace tessera::train {

// Statistics of the routers since the last call, over the tokens of all ranks and the layers of all stages. Resets
// them, and with `update` moves the biases that balance the experts. Nothing for a model without experts. Collective.
std::optional<RouterMetrics> router_metrics(ParallelModel& model, bool update);

}  // namespace tessera::train
