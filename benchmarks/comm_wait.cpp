#include "benchmarks/comm_wait.h"

#include "tessera/comm/detail/records.h"

#include <chrono>

namespace tessera::bench {
namespace {

class CommWaitObserver : public comm::Observer {
 public:
  void on_post(const comm::Record& record) override {
    if (record.kind == comm::CommKind::Wait) wait_start_ = record.posted;
  }
  void on_done(const comm::Record& record) override {
    in_flight_ += record.done - record.posted;
    waiting_ += record.done - wait_start_;
  }
  CommWait result(int steps) const { return {waiting_.count() * 1e3 / steps, 1 - waiting_ / in_flight_}; }

 private:
  comm::Record::Time wait_start_{};
  std::chrono::duration<double> waiting_{}, in_flight_{};
};

}  // namespace

CommWait measure_comm_wait(const Step& step) {
  constexpr int kSteps = 10;
  CommWaitObserver observer;
  const comm::ObserverScope scope(&observer);
  for (int i = 0; i < kSteps; i++) step();
  return observer.result(kSteps);
}

}  // namespace tessera::bench
