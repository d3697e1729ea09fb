#include "tessera/train/detail/loss_monitor.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tessera::train {
namespace {

using Action = LossMonitor::Action;

Action action_for(const std::string& word) {
  return word == "stop" ? Action::Stop : word == "skip" ? Action::Skip : Action::Continue;
}

}  // namespace

LossMonitor::Verdict LossMonitor::check(double loss, double grad_norm, bool norm_may_overflow) {
  if (!std::isfinite(loss)) return {action_for(options_.on_nan), c10::str("the loss is ", loss)};
  if (!std::isfinite(grad_norm) && !norm_may_overflow)
    return {action_for(options_.on_nan), c10::str("the gradient norm is ", grad_norm)};
  if (options_.spike > 0 && losses_.size() >= kMinLosses) {
    const auto n = static_cast<double>(losses_.size());
    const double mean = std::accumulate(losses_.begin(), losses_.end(), 0.0) / n;
    const double squares = std::accumulate(losses_.begin(), losses_.end(), 0.0,
                                           [&](double sum, double x) { return sum + (x - mean) * (x - mean); });
    const double deviation = std::max(std::sqrt(squares / n), 1e-12);
    if (const double deviations = (loss - mean) / deviation; deviations > options_.spike)
      return {action_for(options_.on_spike),
              c10::str("the loss is ", loss, ", ", deviations, " standard deviations above the mean of the last ",
                       losses_.size(), ", ", mean)};
  }
  losses_.push_back(loss);
  if (losses_.size() > kWindow) losses_.pop_front();
  return {};
}

}  // namespace tessera::train
