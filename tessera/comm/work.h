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

// A collective under way. Copies share it. An empty Work is one that is done.
class Work {
 public:
  Work() = default;
  // `finish` runs once, in the first wait(), after the transfer: unpadding, un-permuting, dividing.
  Work(c10::intrusive_ptr<c10d::Work> transfer, std::function<void()> finish, uint64_t record);

  void wait();        // returns when the result may be used; throws CommError naming group, collective and peer
  bool done() const;  // true once wait() would not block
  explicit operator bool() const { return state_ != nullptr; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::comm
