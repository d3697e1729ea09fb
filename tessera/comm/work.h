#pragma once
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace c10d {
class Work;
}

namespace tessera::comm {

// As CommDebugMode counts them: what DTensor redistribution posts, and what c10d's in-place calls post.
enum class Family : uint8_t { Functional, C10d };

class Communicator;
struct Record;
enum class Kind : uint8_t;

// A collective under way. Copies share it. An empty Work is one that is done.
class Work {
 public:
  struct State;  // comm/detail/work_state.h

  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  void wait();        // returns when the result may be used; throws CommError naming group, collective and peer
  bool done() const;  // true once wait() would not block
  // `more` runs once, in the first wait(), after the transfer: unpadding, un-permuting. On a Work that is done: now.
  Work& then(std::function<void()> more);
  explicit operator bool() const { return state_ != nullptr; }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tessera::comm
