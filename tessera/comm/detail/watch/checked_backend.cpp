#include "tessera/comm/detail/watch/checked_backend.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/flat_tensors.h"
#include "tessera/comm/detail/region/collective_fingerprint.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace tessera::comm::watch {
namespace {

using Tensors = CheckedBackend::Tensors;
using WorkPtr = CheckedBackend::WorkPtr;

using detail::bytes_of;

// The bytes of the rows sent to or received from each rank. No splits: equal parts.
std::vector<int64_t> split_bytes(const at::Tensor& x, const std::vector<int64_t>& splits, int ranks) {
  std::vector<int64_t> parts(static_cast<size_t>(ranks), bytes_of(x) / ranks);
  const int64_t row = x.dim() && x.size(0) ? bytes_of(x) / x.size(0) : 0;
  for (size_t r = 0; r < splits.size() && r < parts.size(); r++) parts[r] = splits[r] * row;
  return parts;
}

const at::Tensor& first(const Tensors& xs) {
  TESSERA_CHECK(!xs.empty(), UsageError, "a collective needs at least one tensor");
  return xs[0];
}

}  // namespace

CheckedBackend::CheckedBackend(const ConnectOptions& options, c10::intrusive_ptr<c10d::Backend> inner,
                               std::shared_ptr<Comparer> comparer)
    : MonitoredBackend(options.rank, options.size), name_(inner->getBackendName()) {
  launcher_ = std::make_shared<CheckedLauncher>(
      std::move(inner), std::move(comparer),
      CheckedLauncher::Names{c10::str("rank ", options.ranks[static_cast<size_t>(options.rank)]),
                             c10::str("group '", options.group, "' (ranks ", c10::Join(",", options.ranks), ")")},
      options.timeout);
}
CheckedBackend::~CheckedBackend() { shutdown(); }

void CheckedBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (!launcher_) return;
  launcher_->set_timeout(timeout);
  launcher_->inner().setTimeout(timeout);
}
void CheckedBackend::shutdown() {
  if (launcher_) launcher_->close();
  launcher_.reset();
}
void CheckedBackend::abort_with(const std::string& reason) {
  if (launcher_) launcher_->abort_with(reason);
}

region::CollectiveFingerprint CheckedBackend::fingerprint(CommKind kind, const at::Tensor& x, int64_t root) {
  auto s = region::fingerprint_of(kind, x.scalar_type(), calls_++);
  s.root = static_cast<int32_t>(root);
  return s;
}
region::CollectiveFingerprint CheckedBackend::fingerprint(CommKind kind, const at::Tensor& x, const c10d::ReduceOp& op,
                                                          int64_t root) {
  auto s = fingerprint(kind, x, root);
  s.reduce_op = static_cast<uint8_t>(static_cast<c10d::ReduceOp::RedOpType>(op));
  return s;
}

SendRecvBytes CheckedBackend::same_for_all(int64_t send, int64_t recv) const {
  SendRecvBytes sizes(getSize());
  sizes.send.assign(sizes.send.size(), send);
  sizes.recv.assign(sizes.recv.size(), recv);
  return sizes;
}

WorkPtr CheckedBackend::run(const region::CollectiveFingerprint& fingerprint, const SendRecvBytes& sizes,
                            const at::Tensor& any, CheckedLauncher::Launch launch, std::function<void()> after) {
  TESSERA_CHECK(launcher_, UsageError, "a collective on a closed group");
  const bool later = !any.defined() || any.device().is_cpu();
  return launcher_->run(fingerprint, sizes, later, std::move(launch), std::move(after));
}

WorkPtr CheckedBackend::broadcast(Tensors& xs, const c10d::BroadcastOptions& options) {
  const auto root = static_cast<size_t>(options.rootRank);
  SendRecvBytes sizes(getSize());
  if (getRank() == options.rootRank) sizes.send.assign(sizes.send.size(), bytes_of(xs));
  sizes.recv[root] = bytes_of(xs);
  return run(fingerprint(CommKind::Broadcast, first(xs), options.rootRank), sizes, xs[0],
             [xs, options](c10d::Backend& to) mutable { return to.broadcast(xs, options); });
}

WorkPtr CheckedBackend::allreduce(Tensors& xs, const c10d::AllreduceOptions& options) {
  return run(fingerprint(CommKind::AllReduce, first(xs), options.reduceOp), same_for_all(bytes_of(xs), bytes_of(xs)),
             xs[0], [xs, options](c10d::Backend& to) mutable { return to.allreduce(xs, options); });
}

WorkPtr CheckedBackend::allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& options) {
  return run(fingerprint(CommKind::AllReduceCoalesced, first(xs), options.reduceOp),
             same_for_all(bytes_of(xs), bytes_of(xs)), xs[0],
             [xs, options](c10d::Backend& to) mutable { return to.allreduce_coalesced(xs, options); });
}

WorkPtr CheckedBackend::reduce(Tensors& xs, const c10d::ReduceOptions& options) {
  SendRecvBytes sizes(getSize());
  sizes.send[static_cast<size_t>(options.rootRank)] = bytes_of(xs);
  if (getRank() == options.rootRank) sizes.recv.assign(sizes.recv.size(), bytes_of(xs));
  return run(fingerprint(CommKind::Reduce, first(xs), options.reduceOp, options.rootRank), sizes, xs[0],
             [xs, options](c10d::Backend& to) mutable { return to.reduce(xs, options); });
}

WorkPtr CheckedBackend::allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) {
  SendRecvBytes sizes = same_for_all(bytes_of(ins), -1);
  for (size_t r = 0; !outs.empty() && r < outs[0].size() && r < sizes.recv.size(); r++)
    sizes.recv[r] = bytes_of(outs[0][r]);
  return run(fingerprint(CommKind::AllGather, first(ins)), sizes, ins[0],
             [outs, ins, options](c10d::Backend& to) mutable { return to.allgather(outs, ins, options); });
}

WorkPtr CheckedBackend::_allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) {
  return run(fingerprint(CommKind::AllGatherIntoTensor, in), same_for_all(bytes_of(in), bytes_of(out) / getSize()), in,
             [out, in, options](c10d::Backend& to) mutable { return to._allgather_base(out, in, options); });
}

WorkPtr CheckedBackend::allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                        const c10d::AllgatherOptions& options) {
  return run(fingerprint(CommKind::AllGatherCoalesced, first(ins)),
             same_for_all(bytes_of(ins), bytes_of(outs) / getSize()), ins[0],
             [outs, ins, options](c10d::Backend& to) mutable {
               return to.allgather_into_tensor_coalesced(outs, ins, options);
             });
}

WorkPtr CheckedBackend::gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) {
  SendRecvBytes sizes(getSize());
  sizes.send[static_cast<size_t>(options.rootRank)] = bytes_of(ins);
  for (size_t r = 0; !outs.empty() && r < outs[0].size() && r < sizes.recv.size(); r++)
    sizes.recv[r] = bytes_of(outs[0][r]);
  return run(fingerprint(CommKind::Gather, first(ins), options.rootRank), sizes, ins[0],
             [outs, ins, options](c10d::Backend& to) mutable { return to.gather(outs, ins, options); });
}

WorkPtr CheckedBackend::scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) {
  SendRecvBytes sizes(getSize());
  sizes.recv[static_cast<size_t>(options.rootRank)] = bytes_of(outs);
  for (size_t r = 0; !ins.empty() && r < ins[0].size() && r < sizes.send.size(); r++)
    sizes.send[r] = bytes_of(ins[0][r]);
  return run(fingerprint(CommKind::Scatter, first(outs), options.rootRank), sizes, outs[0],
             [outs, ins, options](c10d::Backend& to) mutable { return to.scatter(outs, ins, options); });
}

// Gloo implements reduce_scatter as an all_reduce, then copies this rank's part, but its Work has no future. This does
// the same with an all_reduce whose Work has one.   rows: (size, n), one row per rank
WorkPtr CheckedBackend::reduce_rows(CommKind kind, const at::Tensor& rows, const c10d::ReduceScatterOptions& options,
                                    std::function<void(const at::Tensor& own_row)> use_own_row) {
  c10d::AllreduceOptions all;
  all.reduceOp = options.reduceOp;
  all.timeout = options.timeout;
  const int64_t part = bytes_of(rows) / getSize();
  return run(
      fingerprint(kind, rows, options.reduceOp), same_for_all(part, part), rows,
      [rows, all](c10d::Backend& to) {
        Tensors xs{rows};
        return to.allreduce(xs, all);
      },
      [rows, use_own_row = std::move(use_own_row), rank = getRank()] { use_own_row(rows.select(0, rank)); });
}

WorkPtr CheckedBackend::reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                                       const c10d::ReduceScatterOptions& options) {
  TESSERA_CHECK(outs.size() == 1 && ins.size() == 1 && static_cast<int>(ins[0].size()) == getSize(), UsageError,
                "reduce_scatter needs one output and ", getSize(), " inputs");
  for (const auto& in : ins[0])
    TESSERA_CHECK(in.numel() == outs[0].numel(), UsageError, "reduce_scatter over ", name_, ": inputs of ", in.sizes(),
                  " for an output of ", outs[0].sizes());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors rows;
  for (const auto& in : ins[0]) rows.push_back(in.reshape({-1}));
  return reduce_rows(CommKind::ReduceScatter, at::stack(rows), options,
                     [out = outs[0]](const at::Tensor& row) { out.copy_(row.view(out.sizes())); });
}

WorkPtr CheckedBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                             const c10d::ReduceScatterOptions& options) {
  Tensors outs{out}, ins{in};
  return reduce_scatter_tensor_coalesced(outs, ins, options);
}

WorkPtr CheckedBackend::reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
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
  const auto kind = ins.size() == 1 ? CommKind::ReduceScatterTensor : CommKind::ReduceScatterCoalesced;
  return reduce_rows(kind, at::cat(rows, 1), options,
                     [outs](const at::Tensor& row) { detail::unflatten_into(outs, row); });
}

WorkPtr CheckedBackend::alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                                      std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) {
  SendRecvBytes sizes(getSize());
  sizes.send = split_bytes(in, in_splits, getSize());
  sizes.recv = split_bytes(out, out_splits, getSize());
  return run(fingerprint(CommKind::AllToAllSingle, in), sizes, in,
             [out, in, out_splits, in_splits, options](c10d::Backend& to) mutable {
               return to.alltoall_base(out, in, out_splits, in_splits, options);
             });
}

WorkPtr CheckedBackend::alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& options) {
  SendRecvBytes sizes(getSize());
  for (size_t r = 0; r < ins.size() && r < sizes.send.size(); r++) sizes.send[r] = bytes_of(ins[r]);
  for (size_t r = 0; r < outs.size() && r < sizes.recv.size(); r++) sizes.recv[r] = bytes_of(outs[r]);
  return run(fingerprint(CommKind::AllToAll, first(ins)), sizes, ins[0],
             [outs, ins, options](c10d::Backend& to) mutable { return to.alltoall(outs, ins, options); });
}

WorkPtr CheckedBackend::send(Tensors& xs, int to, int tag) {
  TESSERA_CHECK(launcher_, UsageError, "send on a closed group");
  return launcher_->track_p2p(launcher_->inner().send(xs, to, tag), c10::str("send to member ", to));
}
WorkPtr CheckedBackend::recv(Tensors& xs, int from, int tag) {
  TESSERA_CHECK(launcher_, UsageError, "recv on a closed group");
  return launcher_->track_p2p(launcher_->inner().recv(xs, from, tag), c10::str("recv from member ", from));
}
WorkPtr CheckedBackend::recvAnysource(Tensors& xs, int tag) {
  TESSERA_CHECK(launcher_, UsageError, "recv on a closed group");
  return launcher_->track_p2p(launcher_->inner().recvAnysource(xs, tag), "recv from any member");
}

WorkPtr CheckedBackend::barrier(const c10d::BarrierOptions& options) {
  const at::Tensor none;
  auto s = region::fingerprint_of(CommKind::Barrier, c10::ScalarType::Undefined, calls_++);
  return run(s, SendRecvBytes(getSize()), none, [options](c10d::Backend& to) { return to.barrier(options); });
}

c10::intrusive_ptr<c10d::Backend> connect_checked_backend(const ConnectOptions& options, const Connect& connect) {
  struct SettingRow {
    const char* setting;
    uint64_t compared;  // collectives compared per group across hosts; on one host: all, or none if 0
  };
  // 64 collectives are about the first two steps of most models. Each comparison costs one round trip to the store.
  constexpr SettingRow kRows[] = {{"first", 64}, {"always", UINT64_MAX}, {"never", 0}};
  const std::string requested = setting("TESSERA_CHECK_COLLECTIVES");
  for (const SettingRow& row : kRows) {
    if (requested != row.setting) continue;
    ConnectOptions compare_options = options;
    compare_options.store = c10::make_intrusive<c10d::PrefixStore>("guard", options.store);
    auto comparer = options.one_host && row.compared > 0 ? compare_by_region(compare_options)
                                                         : compare_by_store(compare_options, row.compared);
    return c10::make_intrusive<CheckedBackend>(options, connect(options), std::move(comparer));
  }
  TESSERA_FAIL(UsageError, "TESSERA_CHECK_COLLECTIVES is '", requested, "'; allowed are first, always and never");
}

}  // namespace tessera::comm::watch
