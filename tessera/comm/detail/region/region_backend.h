#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/region/exchange.h"
#include "tessera/comm/detail/region/host_tensors.h"
#include "tessera/comm/detail/runs.h"
#include "tessera/comm/detail/watch/watched.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera::comm::region {

// c10d's collectives over a memory region. A group of one has no region: its collectives are copies, done at once.
class RegionBackend final : public c10d::Backend, public watch::Watched, public MovesRuns {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `region`: null for a group of one.
  RegionBackend(std::string name, int rank, int size, std::shared_ptr<Region> region, Names names,
                Exchange::Options options);
  ~RegionBackend() override;

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
  WorkPtr allgather_runs(const Tensors& outs, const Runs& runs, const at::Tensor& in) override;
  WorkPtr reduce_scatter_runs(const at::Tensor& out, const Tensors& ins, const Runs& runs,
                              const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options = {}) override;
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& options = {}) override;
  WorkPtr send(Tensors& xs, int to, int tag) override;
  WorkPtr recv(Tensors& xs, int from, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks = false) override;

 private:
  Transfer begin(Kind kind, c10::ScalarType dtype);
  WorkPtr run(Transfer&& transfer, HostTensors& host, Tensors results);
  Exchange& exchange(const char* what);

  std::string name_;
  std::shared_ptr<Region> region_;
  std::shared_ptr<Exchange> exchange_;  // null in a group of one, and after shutdown
  std::atomic<uint64_t> calls_ = 0;
};

}  // namespace tessera::comm::region
