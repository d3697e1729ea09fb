#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

namespace tessera::comm::watch {

class LastCollectiveRecorder;

// A c10d::Backend that can be aborted with a reason (c10d's own abort() takes none). It carries the monitoring state of
// its group.
class MonitoredBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Backend::Backend;

  // Fails all operations, in flight and future ones. Any thread may call it. Only the first reason is stored.
  virtual void abort_with(const std::string& reason) = 0;
  void abort() override { abort_with("the group was aborted"); }

  // Which member of the group is lost, and why. "": no member is known to be lost.
  std::string lost() const { return find_lost_rank ? find_lost_rank() : ""; }

  void setSequenceNumberForGroup() override {}  // all ranks count from 0
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/ = false) override {
    barrier(options)->wait(options.timeout == c10d::kUnsetTimeout ? kNoTimeout : options.timeout);
  }

  std::shared_ptr<LastCollectiveRecorder> recorder;  // null: the group is not monitored
  std::function<std::string()> find_lost_rank;       // null: the group is not monitored

 protected:
  std::atomic<uint64_t> calls_ = 0;  // collectives posted
};

}  // namespace tessera::comm::watch

// Declares the overrides of all collectives of c10d::Backend, for classes that implement all of them.
#define TESSERA_C10D_COLLECTIVES                                                                                       \
  WorkPtr broadcast(Tensors& xs, const c10d::BroadcastOptions& options = {}) override;                                 \
  WorkPtr allreduce(Tensors& xs, const c10d::AllreduceOptions& options = {}) override;                                 \
  WorkPtr allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& options = {}) override;              \
  WorkPtr reduce(Tensors& xs, const c10d::ReduceOptions& options = {}) override;                                       \
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options = {}) override;    \
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options = {}) override;       \
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options = {})     \
      override;                                                                                                        \
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options = {}) override;          \
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options = {}) override;        \
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& options = {})     \
      override;                                                                                                        \
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options = {})        \
      override;                                                                                                        \
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options = {}) \
      override;                                                                                                        \
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,                             \
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options = {}) override;          \
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& options = {}) override;                   \
  WorkPtr send(Tensors& xs, int to, int tag) override;                                                                 \
  WorkPtr recv(Tensors& xs, int from, int tag) override;                                                               \
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override
