#pragma once
#include "tessera/train/config.h"

#include <deque>
#include <string>
#include <vector>

namespace tessera::train {

// Checks loss and gradient norm of each step before the optimizer update: are they finite, and is the loss a spike?
// Its inputs are equal on all ranks, so all ranks get the same verdict.
class LossMonitor {
 public:
  enum class Action : uint8_t { Continue, Skip, Stop };
  struct Verdict {
    Action action = Action::Continue;
    std::string reason = {};  // empty: no problem
    bool operator==(const Verdict&) const = default;
  };
  static constexpr size_t kWindow = 128;    // last losses that a loss is compared with
  static constexpr size_t kMinLosses = 16;  // before spikes are detected

  explicit LossMonitor(const GuardOptions& options) : options_(options) {}
  // `norm_may_overflow`: the gradient scaler handles an infinite norm.
  Verdict check(double loss, double grad_norm, bool norm_may_overflow = false);

  // The window, for checkpoints.
  std::vector<double> losses() const { return {losses_.begin(), losses_.end()}; }
  void set_losses(const std::vector<double>& losses) { losses_.assign(losses.begin(), losses.end()); }

 private:
  GuardOptions options_;
  std::deque<double> losses_;
};

}  // namespace tessera::train
