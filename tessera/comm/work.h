#pragma once
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace c10d {
class Work;
}

namespace tessera::comm {

// How CommDebugMode names a collective. Functional: posted by DTensor redistribution (c10d_functional.all_reduce).
// C10d: posted by an in-place call (c10d.allreduce_).
enum class Family : uint8_t { Functional, C10d };

class Communicator;
struct Record;
enum class CommKind : uint8_t;

// A collective in flight (PyTorch: dist.Work). Copies share it. An empty Work is complete.
class Work {
 public:
  struct State;  // comm/detail/work_state.h

  Work() = default;                                                          // complete
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}  // made by Communicator

  void wait();        // returns when the result can be read; throws CommError with group, collective and peer
  bool done() const;  // true if wait() would not block
  // Runs `more` once, in the first wait(), after the transfer. If the Work is complete, runs it now.
  Work& then(std::function<void()> more);
  explicit operator bool() const { return state_ != nullptr; }  // false: empty

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tessera::comm
