#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/records.h"
#include "tessera/debug/detail/step_profile.h"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>
#include <memory>
#include <optional>

namespace tessera::debug {

// Records a step of this rank. Construct it one step earlier: that step tells it the sizes of the tensors that the
// recorded step frees.
// Ops are those that RecordFunction reports, in this thread and in the threads of backward. On a GPU, their times are
// those of the host.
// Example:  StepProfiler profiler;
//           train_step();
//           profiler.start();
//           train_step();
//           StepProfile profile = profiler.stop();
class StepProfiler final : private comm::Observer {
 public:
  StepProfiler();
  ~StepProfiler() override;
  StepProfiler(const StepProfiler&) = delete;

  void start();
  StepProfile stop();

 private:
  void on_done(const comm::Record& record) override;

  class Recorder;
  std::shared_ptr<Recorder> recorder_;
  std::optional<c10::DebugInfoGuard> guard_;
  std::optional<at::CallbackHandle> callback_;
  std::optional<comm::ObserverScope> comm_scope_;
};

// How the clock of this rank is compared with the clock of rank 0.
struct ClockOffset {
  int64_t offset = 0;  // nanoseconds to add to steady_clock of this rank to get that of rank 0
  int64_t error = 0;   // the true offset differs by at most this
};
// Ranks of one machine share a clock, whose offset is 0 on the machine of rank 0. The first rank of every other machine
// exchanges messages with rank 0 through the store; half the shortest round trip is the bound of the error.
// All ranks call it. Requires: the group has a store.
// `machine`, `now`: for tests; default: this machine and its steady clock.
ClockOffset align_clock(const comm::Group& group, const std::string& machine = {},
                        const std::function<int64_t()>& now = {});

}  // namespace tessera::debug
