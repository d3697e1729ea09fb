#include "tessera/optim/schedulers.h"
#include "tessera/train/detail/train_step.h"

#include <algorithm>
#include <cmath>

namespace tessera::train {

// Counts steps from 1, so that the first step has a learning rate above 0 and the last one has min_factor.
std::function<double(int64_t)> learning_rate_factor(const OptimizerOptions& o, int64_t steps) {
  const int64_t warmup = std::min(o.warmup, steps) + 1, left = std::max<int64_t>(1, steps - warmup);
  std::function<double(int64_t)> from_one;
  if (o.schedule == "cosine") {
    from_one = optim::cosine_with_warmup(warmup, warmup + left, o.min_factor);
  } else if (o.schedule == "linear") {
    from_one = optim::warmup_stable_decay(warmup, 0, left, o.min_factor);
  } else if (o.schedule == "wsd") {
    const auto decay = std::clamp<int64_t>(std::llround(o.decay_share * static_cast<double>(steps)), 1, left);
    from_one = optim::warmup_stable_decay(warmup, left - decay, decay, o.min_factor);
  } else {  // constant
    from_one = optim::warmup_stable_decay(warmup, left, 1, 1);
  }
  return [from_one](int64_t steps_made) { return from_one(steps_made + 1); };
}

}  // namespace tessera::train
