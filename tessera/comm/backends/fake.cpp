#include "tessera/comm/backends.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

// A world of any size without peers, for planning, counting collectives and dry runs. Outputs have the right shape. A
// gather acts as if every peer had the input of this rank. A reduction returns the input of this rank.
namespace tessera::comm::detail {
namespace {

struct FakeWork final : c10d::Work {
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

class FakeBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Backend::Backend;

  const std::string getBackendName() const override { return "fake"; }
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override { return done(); }
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override { return done(); }
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override { return done(); }
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override { return done(); }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done(); }
  WorkPtr send(Tensors&, int, int) override { return done(); }
  WorkPtr recv(Tensors& xs, int, int) override {
    for (auto& x : xs) x.zero_();
    return done();
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    out.view({getSize(), -1}).copy_(in.reshape({1, -1}));
    return done();
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions&) override {
    for (auto& out : outs[0]) out.copy_(ins[0]);
    return done();
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    for (size_t i = 0; i < ins.size(); i++) _allgather_base(outs[i], ins[i], o);
    return done();
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions&) override {
    out.view({-1}).copy_(in.reshape({getSize(), -1}).select(0, getRank()));
    return done();
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions&) override {
    outs[0].copy_(ins[0][static_cast<size_t>(getRank())]);
    return done();
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < ins.size(); i++) _reduce_scatter_base(outs[i], ins[i], o);
    return done();
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions&) override {
    for (auto& list : outs)
      for (auto& out : list) out.copy_(ins[0]);
    return done();
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions&) override {
    if (ins.empty())
      outs[0].zero_();
    else
      outs[0].copy_(ins[0][static_cast<size_t>(getRank())]);
    return done();
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override {
    if (out.sizes() == in.sizes())
      out.copy_(in);
    else
      out.zero_();
    return done();
  }
  WorkPtr alltoall(Tensors& outs, Tensors&, const c10d::AllToAllOptions&) override {
    for (auto& out : outs) out.zero_();
    return done();
  }

 private:
  WorkPtr done() { return done_; }
  WorkPtr done_ = c10::make_intrusive<FakeWork>();
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_fake(const ConnectOptions& options) {
  return c10::make_intrusive<FakeBackend>(options.rank, options.size);
}

}  // namespace tessera::comm::detail
