#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/region/exchange.h"
#include "tessera/comm/detail/region/host_tensors.h"
#include "tessera/comm/detail/segments.h"
#include "tessera/comm/detail/watch/monitored_backend.h"

namespace tessera::comm::region {

// c10d's collectives over a memory region: the backends "threads" and "shm".
// A group of one rank has no region. Its collectives are copies that complete at once.
class RegionBackend final : public watch::MonitoredBackend, public SegmentCollectives {
 public:
  // `region`: null for a group of one rank.
  RegionBackend(std::string name, int rank, int size, std::shared_ptr<Region> region, GroupInfo group,
                Exchange::Options options);
  ~RegionBackend() override;

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void shutdown() override;
  void abort_with(const std::string& reason) override;

  TESSERA_C10D_COLLECTIVES;
  WorkPtr allgather_segments(const Tensors& outs, const Segments& segments, const at::Tensor& in) override;
  WorkPtr reduce_scatter_segments(const at::Tensor& out, const Tensors& ins, const Segments& segments,
                                  const c10d::ReduceScatterOptions& options) override;

 private:
  Transfer begin(CommKind kind, c10::ScalarType dtype);
  WorkPtr run(Transfer&& transfer, HostTensors& host, Tensors results);
  Exchange& exchange(const char* what);

  std::string name_;
  std::shared_ptr<Region> region_;
  std::shared_ptr<Exchange> exchange_;  // null in a group of one rank, and after shutdown
};

}  // namespace tessera::comm::region
