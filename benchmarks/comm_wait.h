#pragma once
#include "benchmarks/train_step.h"

namespace tessera::bench {

// How long a step waits for collectives. A collective is in flight from its start to its completion. It is hidden while
// it is in flight and the thread does not wait for it.
//
//   bucket 0   start ================================= done          in flight: start to done
//   bucket 1             start ======================== done         waiting: wait() to done
//   backward   -----------------------------| wait      wait
struct CommWait {
  double waiting_ms = 0;       // per step
  double hidden_fraction = 0;  // 1 - waiting / in flight, summed over all collectives
};

// Runs several steps and measures them on this thread.
CommWait measure_comm_wait(const Step& step);

}  // namespace tessera::bench
