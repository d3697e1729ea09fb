#pragma once
#include "tessera/base/visit.h"
#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"

#include <deque>
#include <memory>
#include <optional>
#include <vector>

// When the units of one tree of modules are gathered, let go of and reduced.
//
//   forward of k     k is opened, k+1 gathered meanwhile; afterwards k is closed (not the root: its backward is next)
//   backward of k    k is opened, k-1 gathered meanwhile; once its gradients are there k is closed and reduced, while
//                    backward goes on: over shards while k-1 computes, then, where there are replicas, over those
//   end of backward  what is left is reduced, all is waited for, everything is closed
//
// The order is that of the last forward; before the first, that of registration. A forward inside of a backward is a
// checkpoint's: it opens, and changes nothing else.
namespace tessera::data_parallel::fsdp {

enum class BackwardPrefetch : uint8_t {
  None,
  Pre,   // gathers k-1 before the gradients of k are computed
  Post,  // after: less memory, less overlap
};

struct Turn {  // a unit, and how it takes part
  std::shared_ptr<Unit> unit;
  std::optional<bool> reshard_after_forward = {};  // none: unless it is the root
  comm::Group few = {};                            // resharding after forward keeps what these ranks need, see Unit
  bool reshard_after_backward = true;              // false: the buffer stays, until the shard is written to
  bool unshard_in_backward = true;                 // false: nothing of it is needed there, an embedding's say
  bool sync = true;                                // reduce gradients
  bool all_reduce = true;                          // over replicas, too
  bool is_last_backward = true;                    // of the root: wait for reductions when backward ends
  bool prefetch_forward = true;
  int ahead = 1;  // how many units, forward and backward
  BackwardPrefetch prefetch_backward = BackwardPrefetch::Pre;
  // Not empty: gathered in place of the neighbour.
  std::vector<std::weak_ptr<Turn>> forward_prefetch = {}, backward_prefetch = {};
  // Floating-point tensors that go into forward, and that come out of it.
  std::optional<c10::ScalarType> cast_inputs = {}, cast_outputs = {};

  size_t calls = 1;                // modules that make it up: its forward is over when all have run
  std::vector<const void*> ran{};  // of those, in the forward under way
  int task = -1;                   // the last backward it has begun
  size_t compiled_in = 0;          // the compiled step that knows of it, see compiled_step.h
};

class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  // The first one is the root's. `name`: where the unit is.
  void add(std::shared_ptr<Turn> turn, std::string name);

  // `module`: which of those that make up the turn.
  void before_forward(Turn& turn);
  void after_forward(Turn& turn, const void* module, const Tensors& outputs);
  void forward_failed();

  Turn& root() { return *turns_.front(); }
  bool in_forward() const { return depth_ > 0; }
  void abandon();  // after an error: everything is sharded, nothing is pending

 private:
  void end_of_forward(Turn& turn, bool graph);
  void before_backward(Turn& turn, bool values);
  void begin_task(int task);
  void note_in_compiled_step();
  void complete(Turn& turn);
  void finish_one();
  void release(Turn& turn);
  void end_of_backward();
  void prefetch(Turn& turn, const std::vector<std::weak_ptr<Turn>>& asked, int step);
  Turn* neighbour(const Turn& turn, int step) const;

  std::vector<std::shared_ptr<Turn>> turns_;
  std::vector<Turn*> order_, last_order_;  // of forward: the one under way, and the one before
  std::vector<Turn*> running_;             // whose forward has begun and not ended
  int depth_ = 0;                          // of forwards inside of each other
  std::deque<Turn*> reducing_;
  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>();  // empty between forward and backward, and between steps
  StreamSet streams_;
  int task_ = -1;           // the backward under way
  size_t compiled_in_ = 0;  // as Turn has it
};

}  // namespace tessera::data_parallel::fsdp
