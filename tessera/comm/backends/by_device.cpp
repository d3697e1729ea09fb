#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/watch/monitored_backend.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

// Two backends as one: CPU tensors use `host`, all other tensors use `device`.
namespace tessera::comm::detail {
namespace {

class ByDevice final : public watch::MonitoredBackend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  ByDevice(int rank, int size, BackendPtr host, BackendPtr device)
      : MonitoredBackend(rank, size), host_(std::move(host)), device_(std::move(device)) {}

  const std::string getBackendName() const override { return host_->getBackendName(); }
  void abort_with(const std::string& reason) override {
    if (auto* host = dynamic_cast<watch::MonitoredBackend*>(host_.get()))
      host->abort_with(reason);
    else
      host_->abort();
    device_->abort();
  }
  void shutdown() override {
    host_->shutdown();
    device_->shutdown();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    host_->setTimeout(timeout);
    device_->setTimeout(timeout);
  }

  WorkPtr broadcast(Tensors& xs, const c10d::BroadcastOptions& o) override { return of(xs).broadcast(xs, o); }
  WorkPtr allreduce(Tensors& xs, const c10d::AllreduceOptions& o) override { return of(xs).allreduce(xs, o); }
  WorkPtr allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& o) override {
    return of(xs).allreduce_coalesced(xs, o);
  }
  WorkPtr reduce(Tensors& xs, const c10d::ReduceOptions& o) override { return of(xs).reduce(xs, o); }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return of(ins).allgather(outs, ins, o);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return of(in)._allgather_base(out, in, o);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return of(ins).allgather_into_tensor_coalesced(outs, ins, o);
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& o) override {
    return of(ins).gather(outs, ins, o);
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    return of(outs).scatter(outs, ins, o);
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override {
    return of(outs).reduce_scatter(outs, ins, o);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return of(in)._reduce_scatter_base(out, in, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    return of(ins).reduce_scatter_tensor_coalesced(outs, ins, o);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& o) override {
    return of(in).alltoall_base(out, in, out_splits, in_splits, o);
  }
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& o) override {
    return of(ins).alltoall(outs, ins, o);
  }
  WorkPtr send(Tensors& xs, int to, int tag) override { return of(xs).send(xs, to, tag); }
  WorkPtr recv(Tensors& xs, int from, int tag) override { return of(xs).recv(xs, from, tag); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return host_->barrier(o); }

 private:
  c10d::Backend& of(const at::Tensor& x) { return x.is_cpu() ? *host_ : *device_; }
  c10d::Backend& of(const Tensors& xs) {
    TESSERA_CHECK(!xs.empty(), UsageError, "a collective needs at least one tensor");
    return of(xs[0]);
  }
  BackendPtr host_, device_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> by_device(const ConnectOptions& options, c10::intrusive_ptr<c10d::Backend> host,
                                            c10::intrusive_ptr<c10d::Backend> device) {
  return c10::make_intrusive<ByDevice>(options.rank, options.size, std::move(host), std::move(device));
}

}  // namespace tessera::comm::detail
