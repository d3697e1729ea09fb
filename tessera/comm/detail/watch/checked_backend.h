#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/watch/checked_launch.h"
#include "tessera/comm/detail/watch/watched.h"

// Gloo aborts the process on a wrong size, gives garbage for a wrong dtype, and cannot be told to give up: so it stands
// behind a Guard. Each collective says here what of it must agree, and how it is posted once it does.
namespace tessera::comm::watch {

class GuardedBackend final : public c10d::Backend, public Watched {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  GuardedBackend(const ConnectOptions& options, c10::intrusive_ptr<c10d::Backend> inner,
                 std::shared_ptr<Comparer> comparer);
  ~GuardedBackend() override;

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override { poison("the group was aborted"); }
  void shutdown() override;
  void poison(const std::string& reason) override;
  void setSequenceNumberForGroup() override {}  // all ranks count alike from the start
  uint64_t getSequenceNumberForGroup() override { return calls_; }

  WorkPtr broadcast(Tensors& xs, const c10d::BroadcastOptions& options = {}) override;
  WorkPtr allreduce(Tensors& xs, const c10d::AllreduceOptions& options = {}) override;
  WorkPtr allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& options = {}) override;
  WorkPtr reduce(Tensors& xs, const c10d::ReduceOptions& options = {}) override;
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options = {}) override;
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options = {}) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::AllgatherOptions& options = {}) override;
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options = {}) override;
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options = {}) override;
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                         const c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options = {}) override;
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& options = {}) override;
  WorkPtr send(Tensors& xs, int to, int tag) override;  // messages are not compared; a lost rank frees them too
  WorkPtr recv(Tensors& xs, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& xs, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks = false) override;

 private:
  WorkPtr run(const region::Stamp& stamp, const Claim& claim, const at::Tensor& any, Guard::Launch launch,
              std::function<void()> after = {});
  WorkPtr reduce_rows(Kind kind, const at::Tensor& whole, const c10d::ReduceScatterOptions& options,
                      std::function<void(const at::Tensor& own_row)> take);
  region::Stamp stamp(Kind kind, const at::Tensor& x, int64_t root = -1);
  region::Stamp stamp(Kind kind, const at::Tensor& x, const c10d::ReduceOp& op, int64_t root = -1);
  Claim everybody(int64_t gives, int64_t takes) const;

  std::shared_ptr<Guard> guard_;  // null once shut down
  const std::string name_;
  std::atomic<uint64_t> calls_ = 0;
};

// Connects a group with `connect`, behind a guard. On one host the guard comes first and finds out who is missing,
// which connecting would only by its time-out.
c10::intrusive_ptr<c10d::Backend> connect_guarded(const ConnectOptions& options, const Connect& connect);

}  // namespace tessera::comm::watch
