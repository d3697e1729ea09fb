#pragma once
#include "tessera/train/config.h"

#include <deque>
#include <string>
#include <vector>

namespace tessera::train {

// Looks at each step before its update: is the loss a number, and is it anywhere near the last ones? It sees what is
// the same on all ranks, so all come to the same verdict.
class Sentinel {
 public:
  enum class Action : uint8_t { Go, Skip, Stop };
  struct Verdict {
    Action action = Action::Go;
    std::string reason = {};  // empty: nothing was wrong
    bool operator==(const Verdict&) const = default;
  };
  static constexpr size_t kWindow = 128;  // losses that one is compared with
  static constexpr size_t kFewest = 16;   // of them before anything is called a spike

  explicit Sentinel(const GuardOptions& options) : options_(options) {}
  // `norm_may_overflow`: with a gradient scaler an infinite norm is its own affair.
  Verdict look(double loss, double grad_norm, bool norm_may_overflow = false);

  // The losses that the next is compared with, to go on elsewhere.
  std::vector<double> losses() const { return {losses_.begin(), losses_.end()}; }
  void set_losses(const std::vector<double>& losses) { losses_.assign(losses.begin(), losses.end()); }

 private:
  GuardOptions options_;
  std::deque<double> losses_;
};

}  // namespace tessera::train
