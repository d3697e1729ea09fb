#pragma once
#include "tessera/base/visit.h"
#include "tessera/data_parallel/fsdp/unit.h"

#include <deque>
#include <memory>
#include <vector>

// When the units of one tree of modules are gathered, let go of and reduced.
//
//   forward of k     k is opened, k+1 gathered meanwhile; afterwards k is closed (never the root: its backward is next)
//   backward of k    k is opened, k-1 gathered meanwhile; once its gradients are there k is closed and reduced, while
//                    backward goes on; at most one reduction is on the wire
//   end of backward  what is left is reduced, all is waited for, everything is closed
//
// The order is that of the last forward. A forward inside of a backward is a checkpoint's: it opens, and changes
// nothing else.
namespace tessera::data_parallel::fsdp {

enum class BackwardPrefetch : uint8_t {
  None,
  Pre,   // the next unit is gathered before this one's gradients are computed: faster
  Post,  // afterwards: one unit less in memory
};

struct Turn {  // a unit, and how it takes part
  std::shared_ptr<Unit> unit;
  bool reshard_after_forward = true;
  bool sync = true;  // reduce gradients
};

class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  void add(std::shared_ptr<Turn> turn);

  void before_forward(Turn& turn);
  void after_forward(Turn& turn, const Tensors& outputs);
  void forward_failed();

  bool in_forward() const { return !running_.empty(); }

  bool prefetch_forward = true;
  BackwardPrefetch prefetch_backward = BackwardPrefetch::Pre;
  int ahead = 1;  // how many units

 private:
  void before_backward(Turn& turn);
  void complete(Turn& turn);
  void end_of_backward();
  void abandon();
  void prefetch(const Turn& turn, int direction);
  Turn* neighbour(const Turn& turn, int step) const;

  std::vector<std::shared_ptr<Turn>> turns_;
  std::vector<Turn*> order_, last_order_;  // of forward: the one under way, and the one before
  std::vector<Turn*> running_;             // whose forward has begun and not ended
  std::deque<Turn*> reducing_;
  int task_ = -1;  // the backward under way
};

}  // namespace tessera::data_parallel::fsdp
