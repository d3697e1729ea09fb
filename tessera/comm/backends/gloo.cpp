// The only file that uses ProcessGroupGloo. LibTorch exports the class but does not ship gloo's headers. So this file
// is compiled with stub headers on its include path (detail/gloo_stub). ProcessGroupGloo uses gloo's types only behind
// shared_ptr, so empty definitions are enough.
#define USE_C10D_GLOO 1
#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/comm/backends.h"

#include <ATen/ops/view_as_real.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace tessera::comm::detail {
namespace {

// gloo has no complex and no 16-bit integer types. Values are sent as a view of a type that it has. A sum of complex
// numbers is a sum of their parts. 16-bit integers are reduced as 32-bit integers, and the result is copied back.
class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  using WorkRef = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto wire = sent(tensors);
    return ProcessGroupGloo::broadcast(wire, options);
  }
  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduced(tensors, options.reduceOp, [&](Tensors& t) { return ProcessGroupGloo::allreduce(t, options); });
  }
  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return reduced(tensors, options.reduceOp, [&](Tensors& t) { return ProcessGroupGloo::reduce(t, options); });
  }
  WorkRef _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Tensors both{out, in};
    return reduced(both, options.reduceOp,
                   [&](Tensors& t) { return ProcessGroupGloo::_reduce_scatter_base(t[0], t[1], options); });
  }
  WorkRef _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    auto wire_out = sent(out), wire_in = sent(in);
    return ProcessGroupGloo::_allgather_base(wire_out, wire_in, options);
  }
  WorkRef alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) override {
    auto wire_out = sent(out), wire_in = sent(in);
    return ProcessGroupGloo::alltoall_base(wire_out, wire_in, out_splits, in_splits, options);
  }
  WorkRef send(Tensors& tensors, int to, int tag) override {
    auto wire = sent(tensors);
    return ProcessGroupGloo::send(wire, to, tag);
  }
  WorkRef recv(Tensors& tensors, int from, int tag) override {
    auto wire = sent(tensors);
    return ProcessGroupGloo::recv(wire, from, tag);
  }

 private:
  static bool is_16_bit(c10::ScalarType type) { return type == at::kShort || type == at::kUInt16; }

  static at::Tensor sent(const at::Tensor& t) {
    if (t.is_complex()) return at::view_as_real(t);
    return is_16_bit(t.scalar_type()) ? t.unsqueeze(-1).view(at::kByte) : t;
  }
  static Tensors sent(const Tensors& tensors) {
    Tensors wire;
    for (const auto& t : tensors) wire.push_back(sent(t));
    return wire;
  }

  template <class Reduce>
  static WorkRef reduced(Tensors& tensors, const c10d::ReduceOp& op, Reduce reduce) {
    const auto type = tensors[0].scalar_type();
    if (is_16_bit(type)) {
      Tensors wide;
      for (const auto& t : tensors) wide.push_back(t.to(at::kInt));
      auto work = reduce(wide);
      work->wait();
      tensors[0].copy_(wide[0]);
      return work;
    }
    if (!c10::isComplexType(type)) return reduce(tensors);
    TESSERA_CHECK(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG, UsageError, "backend gloo: only sum and avg ",
                  "reduce tensors of ", type, "; gather them and reduce the result");
    auto parts = sent(tensors);
    return reduce(parts);
  }
};

using GlooOptions = c10::intrusive_ptr<c10d::ProcessGroupGloo::Options>;

c10::intrusive_ptr<c10d::Backend> construct(const ConnectOptions& options, const GlooOptions& gloo) {
  return c10::make_intrusive<GlooBackend>(options.store, options.rank, options.size, gloo);
}

// Gloo's connect waits for every member until the time-out, and cannot be interrupted. So it runs on a thread of its
// own. If a member is lost meanwhile, that thread is left behind: it ends with the time-out or with the process.
c10::intrusive_ptr<c10d::Backend> construct_unless_lost(const ConnectOptions& options, const GlooOptions& gloo) {
  struct Connecting {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    c10::intrusive_ptr<c10d::Backend> backend;
    std::exception_ptr error;
  };
  const auto connecting = std::make_shared<Connecting>();
  std::thread([connecting, options, gloo] {
    c10::intrusive_ptr<c10d::Backend> backend;
    std::exception_ptr error;
    try {
      backend = construct(options, gloo);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(connecting->mutex);
    connecting->backend = std::move(backend);
    connecting->error = error;
    connecting->done = true;
    connecting->changed.notify_one();
  }).detach();
  std::unique_lock lock(connecting->mutex);
  while (!connecting->changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return connecting->done; }))
    if (const std::string why = options.lost(); !why.empty()) TESSERA_FAIL(CommError, why);
  if (connecting->error) std::rethrow_exception(connecting->error);
  return std::move(connecting->backend);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_gloo(const ConnectOptions& options) {
  using c10d::ProcessGroupGloo;
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  std::string host = setting("TESSERA_GLOO_HOST");
  if (host.empty() && options.one_host) host = "127.0.0.1";  // no other machine needs to reach this one
  gloo->devices.push_back(host.empty() ? ProcessGroupGloo::createDefaultDevice()
                                       : ProcessGroupGloo::createDeviceForHostname(host));
  gloo->group_name = options.group;
  gloo->global_ranks_in_group.assign(options.ranks.begin(), options.ranks.end());
  return options.lost ? construct_unless_lost(options, gloo) : construct(options, gloo);
}

}  // namespace tessera::comm::detail
