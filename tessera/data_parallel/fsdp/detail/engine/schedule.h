#pragma once
#include "tessera/base/visit.h"
#include "tessera/data_parallel/detail/requires_grad_agreement.h"
#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"

#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace tessera::data_parallel::fsdp {

// When backward starts the all-gather of the next parameter group.
enum class BackwardPrefetch : uint8_t {
  None,  // when the group is used
  Pre,   // before the gradients of the current group are computed
  Post,  // after: less memory, less overlap
};

// A parameter group and its settings in the schedule.
struct ScheduledGroup {
  std::shared_ptr<ParamGroup> group;
  std::optional<bool> reshard_after_forward = {};  // none: true, except for the root
  comm::Group reshard_group = {};                  // not null: after forward, reshard_to() this group
  bool reshard_after_backward = true;              // false: keep the buffer until the shard is written to
  bool unshard_in_backward = true;                 // false: backward needs no parameter values (an embedding)
  bool sync = true;                                // reduce gradients
  bool all_reduce = true;                          // all-reduce gradients over replicas
  bool is_last_backward = true;                    // of the root: wait for reductions when backward ends
  bool prefetch_forward = true;
  int prefetch_depth = 1;  // number of groups to prefetch, in forward and in backward
  BackwardPrefetch prefetch_backward = BackwardPrefetch::Pre;
  // Not empty: these groups are prefetched, not the next one in order.
  std::vector<std::weak_ptr<ScheduledGroup>> forward_prefetch = {}, backward_prefetch = {};
  // Dtype to which floating-point inputs and outputs of forward are cast.
  std::optional<c10::ScalarType> cast_inputs = {}, cast_outputs = {};

  size_t num_modules = 1;                     // forward of the group ends when all of its modules have run
  std::vector<const void*> modules_run = {};  // in the current forward
  int graph_task = -1;                        // id of the last backward that reached the group
  size_t trace_serial = 0;                    // the traced step that has a snapshot of this group (trace_state.h)
};

// Decides when the parameter groups of one module tree are unsharded, resharded and reduced.
//
//   forward of k     unshards k and prefetches k+1; then reshards k (not the root: its backward is next)
//   backward of k    unshards k and prefetches k-1. When the gradients of k are ready, reshards k and starts its
//                    reduce-scatter, which overlaps with backward of k-1. The all-reduce over replicas follows.
//   end of backward  reduces the remaining groups, also those of which only earlier backward passes without
//                    synchronization have gradients; waits for all reductions, reshards all groups
//
// Unsharded buffers that outlive a forward or backward are compared with the shards before the next forward uses them.
// The order is that of the last forward, or of registration before the first forward. A forward inside backward
// (activation checkpointing) unshards its group and changes nothing else.
class Schedule : public BackwardEvents, public std::enable_shared_from_this<Schedule> {
 public:
  // The first group is the root's. `name`: path of its module.
  void add(std::shared_ptr<ScheduledGroup> scheduled, std::string name);
  // After the last add(). Requires: the ranks have compared their groups.
  void start();

  // `module`: which module of the group runs.
  void before_forward(ScheduledGroup& scheduled);
  void after_forward(ScheduledGroup& scheduled, const void* module, const Tensors& outputs);
  void forward_failed();

  ScheduledGroup& root() { return *groups_.front(); }
  bool in_forward() const { return forward_depth_ > 0; }
  void abandon();  // after an error: all groups are sharded and no collective is in flight

  void before_backward(ParamGroup& group, bool needs_values) override;
  void gradients_ready(ParamGroup& group) override;

 private:
  void discard_stale_buffers();
  void end_forward(ScheduledGroup& scheduled, bool has_graph);
  void before_backward(ScheduledGroup& scheduled, bool needs_values);
  void begin_graph_task(int graph_task);
  void snapshot_in_traced_step();
  void reduce_gradients(ScheduledGroup& scheduled);
  void start_reduction(ScheduledGroup& scheduled);
  void finish_oldest_reduction();
  void reshard_after_backward(ScheduledGroup& scheduled);
  void end_backward();
  void prefetch(ScheduledGroup& scheduled, const std::vector<std::weak_ptr<ScheduledGroup>>& requested, int step);
  ScheduledGroup* neighbor(const ScheduledGroup& scheduled, int step) const;

  std::vector<std::shared_ptr<ScheduledGroup>> groups_;
  NamedTensors params_;                   // of all groups
  std::vector<comm::Group> comm_groups_;  // over which they are sharded and replicated
  RequiresGradAgreement frozen_;
  std::vector<ScheduledGroup*> order_, last_order_;  // of the current forward, and of the one before
  std::vector<ScheduledGroup*> running_;             // forward has begun and not ended
  int forward_depth_ = 0;                            // of nested forward calls
  std::deque<ScheduledGroup*> reducing_;
  // Cleared between forward and backward, and between steps.
  std::shared_ptr<BufferPool> buffer_pool_ = std::make_shared<BufferPool>();
  FSDPStreams streams_;
  int graph_task_ = -1;      // id of the current backward
  size_t trace_serial_ = 0;  // as in ScheduledGroup
};

}  // namespace tessera::data_parallel::fsdp
