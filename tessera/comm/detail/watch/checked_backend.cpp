#include "tessera/comm/detail/watch/checked_backend.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/settings.h"
#include "tessera/comm/detail/region/collective_stamp.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace tessera::comm::watch {
namespace {

using Tensors = GuardedBackend::Tensors;
using WorkPtr = GuardedBackend::WorkPtr;

int64_t bytes_of(const at::Tensor& x) { return static_cast<int64_t>(x.nbytes()); }
int64_t bytes_of(const Tensors& xs) {
  int64_t total = 0;
  for (const auto& x : xs) total += bytes_of(x);
  return total;
}

// Rows sent to or got from each rank, in bytes; no splits: equal parts.
std::vector<int64_t> cut(const at::Tensor& x, const std::vector<int64_t>& splits, int ranks) {
  std::vector<int64_t> parts(static_cast<size_t>(ranks), bytes_of(x) / ranks);
  const int64_t row = x.dim() && x.size(0) ? bytes_of(x) / x.size(0) : 0;
  for (size_t r = 0; r < splits.size() && r < parts.size(); r++) parts[r] = splits[r] * row;
  return parts;
}

const at::Tensor& first(const Tensors& xs) {
  TESSERA_CHECK(!xs.empty(), UsageError, "a collective of no tensors");
  return xs[0];
}

}  // namespace

GuardedBackend::GuardedBackend(const ConnectOptions& options, c10::intrusive_ptr<c10d::Backend> inner,
                               std::shared_ptr<Comparer> comparer)
    : Backend(options.rank, options.size), name_(inner->getBackendName()) {
  guard_ = std::make_shared<Guard>(
      std::move(inner), std::move(comparer),
      Guard::Names{c10::str("rank ", options.ranks[static_cast<size_t>(options.rank)]),
                   c10::str("group '", options.group, "' (ranks ", c10::Join(",", options.ranks), ")")},
      options.timeout);
}
GuardedBackend::~GuardedBackend() { shutdown(); }

void GuardedBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (!guard_) return;
  guard_->set_timeout(timeout);
  guard_->inner().setTimeout(timeout);
}
void GuardedBackend::shutdown() {
  if (guard_) guard_->close();
  guard_.reset();
}
void GuardedBackend::poison(const std::string& reason) {
  if (guard_) guard_->poison(reason);
}

region::Stamp GuardedBackend::stamp(Kind kind, const at::Tensor& x, int64_t root) {
  auto s = region::stamp_of(kind, x.scalar_type(), calls_++);
  s.root = static_cast<int32_t>(root);
  return s;
}
region::Stamp GuardedBackend::stamp(Kind kind, const at::Tensor& x, const c10d::ReduceOp& op, int64_t root) {
  auto s = stamp(kind, x, root);
  s.reduce_op = static_cast<uint8_t>(static_cast<c10d::ReduceOp::RedOpType>(op));
  return s;
}

Claim GuardedBackend::everybody(int64_t gives, int64_t takes) const {
  Claim claim(getSize());
  claim.gives.assign(claim.gives.size(), gives);
  claim.takes.assign(claim.takes.size(), takes);
  return claim;
}

WorkPtr GuardedBackend::run(const region::Stamp& stamp, const Claim& claim, const at::Tensor& any, Guard::Launch launch,
                            std::function<void()> after) {
  TESSERA_CHECK(guard_, UsageError, "a collective on a closed group");
  const bool later = !any.defined() || any.device().is_cpu();
  return guard_->run(stamp, claim, later, std::move(launch), std::move(after));
}

WorkPtr GuardedBackend::broadcast(Tensors& xs, const c10d::BroadcastOptions& options) {
  const auto root = static_cast<size_t>(options.rootRank);
  Claim claim(getSize());
  if (getRank() == options.rootRank) claim.gives.assign(claim.gives.size(), bytes_of(xs));
  claim.takes[root] = bytes_of(xs);
  return run(stamp(Kind::Broadcast, first(xs), options.rootRank), claim, xs[0],
             [xs, options](c10d::Backend& to) mutable { return to.broadcast(xs, options); });
}

WorkPtr GuardedBackend::allreduce(Tensors& xs, const c10d::AllreduceOptions& options) {
  return run(stamp(Kind::AllReduce, first(xs), options.reduceOp), everybody(bytes_of(xs), bytes_of(xs)), xs[0],
             [xs, options](c10d::Backend& to) mutable { return to.allreduce(xs, options); });
}

WorkPtr GuardedBackend::allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& options) {
  return run(stamp(Kind::AllReduceCoalesced, first(xs), options.reduceOp), everybody(bytes_of(xs), bytes_of(xs)), xs[0],
             [xs, options](c10d::Backend& to) mutable { return to.allreduce_coalesced(xs, options); });
}

WorkPtr GuardedBackend::reduce(Tensors& xs, const c10d::ReduceOptions& options) {
  Claim claim(getSize());
  claim.gives[static_cast<size_t>(options.rootRank)] = bytes_of(xs);
  if (getRank() == options.rootRank) claim.takes.assign(claim.takes.size(), bytes_of(xs));
  return run(stamp(Kind::Reduce, first(xs), options.reduceOp, options.rootRank), claim, xs[0],
             [xs, options](c10d::Backend& to) mutable { return to.reduce(xs, options); });
}

WorkPtr GuardedBackend::allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) {
  Claim claim = everybody(bytes_of(ins), -1);
  for (size_t r = 0; !outs.empty() && r < outs[0].size() && r < claim.takes.size(); r++)
    claim.takes[r] = bytes_of(outs[0][r]);
  return run(stamp(Kind::AllGather, first(ins)), claim, ins[0],
             [outs, ins, options](c10d::Backend& to) mutable { return to.allgather(outs, ins, options); });
}

WorkPtr GuardedBackend::_allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) {
  return run(stamp(Kind::AllGatherIntoTensor, in), everybody(bytes_of(in), bytes_of(out) / getSize()), in,
             [out, in, options](c10d::Backend& to) mutable { return to._allgather_base(out, in, options); });
}

WorkPtr GuardedBackend::allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                        const c10d::AllgatherOptions& options) {
  return run(stamp(Kind::AllGatherCoalesced, first(ins)), everybody(bytes_of(ins), bytes_of(outs) / getSize()), ins[0],
             [outs, ins, options](c10d::Backend& to) mutable {
               return to.allgather_into_tensor_coalesced(outs, ins, options);
             });
}

WorkPtr GuardedBackend::gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) {
  Claim claim(getSize());
  claim.gives[static_cast<size_t>(options.rootRank)] = bytes_of(ins);
  for (size_t r = 0; !outs.empty() && r < outs[0].size() && r < claim.takes.size(); r++)
    claim.takes[r] = bytes_of(outs[0][r]);
  return run(stamp(Kind::Gather, first(ins), options.rootRank), claim, ins[0],
             [outs, ins, options](c10d::Backend& to) mutable { return to.gather(outs, ins, options); });
}

WorkPtr GuardedBackend::scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) {
  Claim claim(getSize());
  claim.takes[static_cast<size_t>(options.rootRank)] = bytes_of(outs);
  for (size_t r = 0; !ins.empty() && r < ins[0].size() && r < claim.gives.size(); r++)
    claim.gives[r] = bytes_of(ins[0][r]);
  return run(stamp(Kind::Scatter, first(outs), options.rootRank), claim, outs[0],
             [outs, ins, options](c10d::Backend& to) mutable { return to.scatter(outs, ins, options); });
}

// Gloo reduces everything and takes its part of it, in a work that has no future; here the taking comes after an
// all_reduce that has one.   whole: one row a rank
WorkPtr GuardedBackend::reduce_rows(Kind kind, const at::Tensor& whole, const c10d::ReduceScatterOptions& options,
                                    std::function<void(const at::Tensor& own_row)> take) {
  c10d::AllreduceOptions all;
  all.reduceOp = options.reduceOp;
  all.timeout = options.timeout;
  const int64_t part = bytes_of(whole) / getSize();
  return run(
      stamp(kind, whole, options.reduceOp), everybody(part, part), whole,
      [whole, all](c10d::Backend& to) {
        Tensors xs{whole};
        return to.allreduce(xs, all);
      },
      [whole, take = std::move(take), rank = getRank()] { take(whole.select(0, rank)); });
}

WorkPtr GuardedBackend::reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                                       const c10d::ReduceScatterOptions& options) {
  TESSERA_CHECK(outs.size() == 1 && ins.size() == 1 && static_cast<int>(ins[0].size()) == getSize(), UsageError,
                "reduce_scatter needs one output and ", getSize(), " inputs");
  for (const auto& in : ins[0])
    TESSERA_CHECK(in.numel() == outs[0].numel(), UsageError, "reduce_scatter over ", name_, ": inputs of ", in.sizes(),
                  " for an output of ", outs[0].sizes());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors rows;
  for (const auto& in : ins[0]) rows.push_back(in.reshape({-1}));
  return reduce_rows(Kind::ReduceScatter, at::stack(rows), options,
                     [out = outs[0]](const at::Tensor& row) { out.copy_(row.view(out.sizes())); });
}

WorkPtr GuardedBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                             const c10d::ReduceScatterOptions& options) {
  Tensors outs{out}, ins{in};
  return reduce_scatter_tensor_coalesced(outs, ins, options);
}

WorkPtr GuardedBackend::reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                        const c10d::ReduceScatterOptions& options) {
  TESSERA_CHECK(outs.size() == ins.size(), UsageError, "reduce_scatter of ", ins.size(), " inputs and ", outs.size(),
                " outputs");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors rows;
  for (size_t i = 0; i < ins.size(); i++) {
    TESSERA_CHECK(ins[i].numel() == outs[i].numel() * getSize(), UsageError, "reduce_scatter on ", getSize(),
                  " ranks: input ", i, " is ", ins[i].sizes(), ", output ", outs[i].sizes());
    rows.push_back(ins[i].reshape({getSize(), -1}));
  }
  const auto kind = ins.size() == 1 ? Kind::ReduceScatterTensor : Kind::ReduceScatterCoalesced;
  return reduce_rows(kind, at::cat(rows, 1), options, [outs](const at::Tensor& row) {
    int64_t offset = 0;
    for (const auto& out : outs) {
      out.copy_(row.narrow(0, offset, out.numel()).view(out.sizes()));
      offset += out.numel();
    }
  });
}

WorkPtr GuardedBackend::alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                                      std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) {
  Claim claim(getSize());
  claim.gives = cut(in, in_splits, getSize());
  claim.takes = cut(out, out_splits, getSize());
  return run(stamp(Kind::AllToAllSingle, in), claim, in,
             [out, in, out_splits, in_splits, options](c10d::Backend& to) mutable {
               return to.alltoall_base(out, in, out_splits, in_splits, options);
             });
}

WorkPtr GuardedBackend::alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& options) {
  Claim claim(getSize());
  for (size_t r = 0; r < ins.size() && r < claim.gives.size(); r++) claim.gives[r] = bytes_of(ins[r]);
  for (size_t r = 0; r < outs.size() && r < claim.takes.size(); r++) claim.takes[r] = bytes_of(outs[r]);
  return run(stamp(Kind::AllToAll, first(ins)), claim, ins[0],
             [outs, ins, options](c10d::Backend& to) mutable { return to.alltoall(outs, ins, options); });
}

WorkPtr GuardedBackend::send(Tensors& xs, int to, int tag) {
  TESSERA_CHECK(guard_, UsageError, "send on a closed group");
  return guard_->message(guard_->inner().send(xs, to, tag), c10::str("send to member ", to));
}
WorkPtr GuardedBackend::recv(Tensors& xs, int from, int tag) {
  TESSERA_CHECK(guard_, UsageError, "recv on a closed group");
  return guard_->message(guard_->inner().recv(xs, from, tag), c10::str("recv from member ", from));
}
WorkPtr GuardedBackend::recvAnysource(Tensors& xs, int tag) {
  TESSERA_CHECK(guard_, UsageError, "recv on a closed group");
  return guard_->message(guard_->inner().recvAnysource(xs, tag), "recv from any member");
}

WorkPtr GuardedBackend::barrier(const c10d::BarrierOptions& options) {
  const at::Tensor none;
  auto s = region::stamp_of(Kind::Barrier, c10::ScalarType::Undefined, calls_++);
  return run(s, Claim(getSize()), none, [options](c10d::Backend& to) { return to.barrier(options); });
}
void GuardedBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  barrier(options)->wait(options.timeout == c10d::kUnsetTimeout ? kNoTimeout : options.timeout);
}

c10::intrusive_ptr<c10d::Backend> connect_guarded(const ConnectOptions& options, const Connect& connect) {
  struct Row {
    const char* setting;
    uint64_t compared;  // across hosts: how many collectives of a group; on one host every one is, if any
  };
  // Sixty-four are the first two steps of most models; and each costs a rank a round trip to the store.
  constexpr Row kRows[] = {{"first", 64}, {"always", UINT64_MAX}, {"never", 0}};
  const std::string asked = setting("TESSERA_CHECK_COLLECTIVES");
  for (const Row& row : kRows) {
    if (asked != row.setting) continue;
    ConnectOptions guard = options;
    guard.store = c10::make_intrusive<c10d::PrefixStore>("guard", options.store);
    auto comparer =
        options.one_host && row.compared > 0 ? compare_by_region(guard) : compare_by_store(guard, row.compared);
    return c10::make_intrusive<GuardedBackend>(options, connect(options), std::move(comparer));
  }
  TESSERA_FAIL(UsageError, "TESSERA_CHECK_COLLECTIVES is '", asked, "'; it may be first, always or never");
}

}  // namespace tessera::comm::watch
