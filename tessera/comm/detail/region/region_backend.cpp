#include "tessera/comm/detail/region/region_backend.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/flat_tensors.h"
#include "tessera/comm/detail/region/collective_fingerprint.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>

namespace tessera::comm::region {
namespace {

using Tensors = RegionBackend::Tensors;

FuturePtr completed_future(const Tensors& results) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(results));
  return future;
}

struct DoneWork final : c10d::Work {
  explicit DoneWork(Tensors results) : results_(std::move(results)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  Tensors result() override { return results_; }
  FuturePtr getFuture() override { return completed_future(results_); }

 private:
  Tensors results_;
};

struct RegionWork final : c10d::Work {
  RegionWork(std::shared_ptr<Exchange> exchange, OperationPtr operation, Tensors results)
      : exchange_(std::move(exchange)), operation_(std::move(operation)), results_(std::move(results)) {}

  bool isCompleted() override { return exchange_->poll(*operation_); }
  bool isSuccess() const override {
    return operation_->done.load(std::memory_order_acquire) && exchange_->error_of(*operation_).empty();
  }
  std::exception_ptr exception() const override {
    const std::string error = exchange_->error_of(*operation_);
    return error.empty() ? nullptr : std::make_exception_ptr(CommError({__func__, __FILE__, __LINE__}, error));
  }
  bool wait(std::chrono::milliseconds timeout) override {
    exchange_->wait(*operation_, timeout == kNoTimeout ? exchange_->timeout() : timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results_; }
  FuturePtr getFuture() override { return exchange_->future(*operation_, results_); }

 private:
  std::shared_ptr<Exchange> exchange_;
  OperationPtr operation_;
  Tensors results_;
};

const at::Tensor& single(const Tensors& xs) {
  TESSERA_CHECK(xs.size() == 1, UsageError, "the collective takes one tensor per rank; found ", xs.size());
  return xs[0];
}

Bytes bytes_of(const at::Tensor& x) { return {static_cast<char*>(x.data_ptr()), static_cast<int64_t>(x.nbytes())}; }
// Part r of n equal parts.
Bytes part(const Bytes& all, int r, int n) { return {all.data + all.size / n * r, all.size / n}; }

// `padding`: memory that padding segments point to; null: padding has no memory.
Bytes bytes_of(const std::vector<BufferSegment>& segments, const Tensors& tensors, int64_t element, char* padding) {
  Bytes all;
  all.parts.reserve(segments.size());
  for (const BufferSegment& segment : segments) {
    char* from = padding;
    if (segment.tensor != kPaddingSegment)
      from = static_cast<char*>(tensors[static_cast<size_t>(segment.tensor)].data_ptr()) + segment.begin * element;
    if (segment.size > 0) all.parts.push_back({from, segment.size * element});
    all.size += segment.size * element;
  }
  static char not_null;
  all.data = &not_null;
  return all;
}

uint8_t wire(const c10d::ReduceOp& op) { return static_cast<uint8_t>(static_cast<c10d::ReduceOp::RedOpType>(op)); }

bool overlap(const Bytes& a, const Bytes& b) {
  bool found = false;
  for_each_span(a, 0, a.size, [&](const char* from, int64_t n) {
    for_each_span(b, 0, b.size,
                  [&](const char* to, int64_t m) { found |= from && to && from < to + m && to < from + n; });
  });
  return found;
}

// Output chunks are written while input chunks are still to be read, so inputs and outputs must not share memory.
// Exceptions: the bytes that a rank sends to itself, and an all_reduce, which reads each chunk before it writes it.
void copy_overlapping_inputs(Transfer& t, int rank) {
  if (t.reduced && !t.per_rank_inputs) return;
  const size_t own_input = t.per_rank_inputs ? static_cast<size_t>(rank) : 0,
               own_output = t.reduced ? 0 : static_cast<size_t>(rank);
  bool shared = false;
  int64_t total = 0;
  for (size_t g = 0; g < t.inputs.size(); g++) {
    total += t.inputs[g].size;
    for (size_t k = 0; k < t.outputs.size(); k++)
      shared |= overlap(t.inputs[g], t.outputs[k]) &&
                !(g == own_input && k == own_output && t.inputs[g].data == t.outputs[k].data);
  }
  if (!shared) return;
  at::Tensor copies = at::empty({total}, at::kByte);
  char* to = static_cast<char*>(copies.data_ptr());
  for (Bytes& input : t.inputs) {
    copy_out(input, 0, input.size, to);
    input = {to, input.size};
    to += input.size;
  }
  t.keep.push_back(copies);
}

// Runs `first`, then `second`. Either may be null.
std::function<void()> in_sequence(std::function<void()> first, std::function<void()> second) {
  if (!first) return second;
  if (!second) return first;
  return [first = std::move(first), second = std::move(second)] {
    first();
    second();
  };
}

// In a group of one rank, tensors of a device stay there: nothing is staged through the host.
bool stays_on_device(int size, const at::Tensor& x) { return size == 1 && !x.is_cpu(); }

c10::intrusive_ptr<c10d::Work> copied_on_device(const at::Tensor& out, const at::Tensor& in) {
  if (out.data_ptr() != in.data_ptr()) out.view({-1}).copy_(in.view({-1}));
  return c10::make_intrusive<DoneWork>(Tensors{out});
}

}  // namespace

RegionBackend::RegionBackend(std::string name, int rank, int size, std::shared_ptr<Region> region, GroupInfo group,
                             Exchange::Options options)
    : MonitoredBackend(rank, size), name_(std::move(name)), region_(std::move(region)) {
  if (region_) exchange_ = std::make_shared<Exchange>(region_, rank, std::move(group), options);
}
RegionBackend::~RegionBackend() { shutdown(); }

void RegionBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (exchange_) exchange_->set_timeout(timeout);
}
void RegionBackend::shutdown() {
  if (exchange_) exchange_->leave();
  exchange_.reset();
  region_.reset();
}
void RegionBackend::abort_with(const std::string& reason) {
  if (region_) region_->abort(reason);
}

Exchange& RegionBackend::exchange(const char* what) {
  TESSERA_CHECK(exchange_, UsageError, what,
                getSize() == 1 ? " needs a peer; this group has one rank" : " on a closed group");
  return *exchange_;
}

Transfer RegionBackend::begin(CommKind kind, c10::ScalarType dtype) {
  Transfer t;
  t.fingerprint = fingerprint_of(kind, dtype, calls_++);
  return t;
}

RegionBackend::WorkPtr RegionBackend::run(Transfer&& t, HostTensors& host, Tensors results) {
  if (t.reduced)
    check_reducible(static_cast<WireOp>(t.fingerprint.reduce_op), static_cast<c10::ScalarType>(t.fingerprint.dtype));
  t.finish = in_sequence(host.finish(), std::move(t.finish));
  if (getSize() == 1) {
    if (!t.inputs.empty() && t.outputs[0].data && t.outputs[0].data != t.inputs[0].data)
      std::memmove(t.outputs[0].data, t.inputs[0].data, static_cast<size_t>(t.outputs[0].size));
    if (t.finish) t.finish();
    return c10::make_intrusive<DoneWork>(std::move(results));
  }
  copy_overlapping_inputs(t, getRank());
  auto operation = exchange("a collective").post(std::move(t));
  return c10::make_intrusive<RegionWork>(exchange_, std::move(operation), std::move(results));
}

RegionBackend::WorkPtr RegionBackend::broadcast(Tensors& xs, const c10d::BroadcastOptions& options) {
  if (stays_on_device(getSize(), single(xs))) return c10::make_intrusive<DoneWork>(xs);
  HostTensors host;
  const bool source = getRank() == options.rootRank;
  const at::Tensor x = source ? host.input(single(xs)) : host.output(single(xs));
  Transfer t = begin(CommKind::Broadcast, x.scalar_type());
  t.fingerprint.root = static_cast<int32_t>(options.rootRank);
  t.inputs.push_back(source ? bytes_of(x) : Bytes{});
  t.outputs.resize(static_cast<size_t>(getSize()));
  if (!source) t.outputs[static_cast<size_t>(options.rootRank)] = bytes_of(x);
  t.keep = {x};
  return run(std::move(t), host, xs);
}

RegionBackend::WorkPtr RegionBackend::allreduce(Tensors& xs, const c10d::AllreduceOptions& options) {
  if (stays_on_device(getSize(), single(xs))) return c10::make_intrusive<DoneWork>(xs);
  HostTensors host;
  const at::Tensor x = host.inout(single(xs));
  Transfer t = begin(CommKind::AllReduce, x.scalar_type());
  t.fingerprint.reduce_op = wire(options.reduceOp);
  t.reduced = true;
  t.inputs.push_back(bytes_of(x));
  t.outputs.push_back(bytes_of(x));
  t.keep = {x};
  return run(std::move(t), host, xs);
}

RegionBackend::WorkPtr RegionBackend::allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& options) {
  if (xs.size() == 1) return allreduce(xs, options);
  if (xs.empty() || stays_on_device(getSize(), xs[0])) return c10::make_intrusive<DoneWork>(xs);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  detail::check_same_dtype("allreduce_coalesced", xs);
  const at::Tensor all = detail::flatten(xs);
  HostTensors host;
  const at::Tensor wire_all = host.inout(all);
  Transfer t = begin(CommKind::AllReduceCoalesced, all.scalar_type());
  t.fingerprint.reduce_op = wire(options.reduceOp);
  t.reduced = true;
  t.inputs.push_back(bytes_of(wire_all));
  t.outputs.push_back(bytes_of(wire_all));
  t.keep = {wire_all};
  t.finish = [xs, all] { detail::unflatten_into(xs, all); };
  return run(std::move(t), host, xs);
}

RegionBackend::WorkPtr RegionBackend::reduce(Tensors& xs, const c10d::ReduceOptions& options) {
  if (stays_on_device(getSize(), single(xs))) return c10::make_intrusive<DoneWork>(xs);
  HostTensors host;
  const bool target = getRank() == options.rootRank;
  const at::Tensor x = target ? host.inout(single(xs)) : host.input(single(xs));
  Transfer t = begin(CommKind::Reduce, x.scalar_type());
  t.fingerprint.reduce_op = wire(options.reduceOp);
  t.fingerprint.root = static_cast<int32_t>(options.rootRank);
  t.reduced = true;
  t.inputs.push_back(bytes_of(x));
  t.outputs.push_back(target ? bytes_of(x) : Bytes{});
  t.keep = {x};
  return run(std::move(t), host, xs);
}

RegionBackend::WorkPtr RegionBackend::_allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) {
  if (stays_on_device(getSize(), out) && out.numel() == in.numel()) return copied_on_device(out, in);
  HostTensors host;
  const at::Tensor wire_in = host.input(in), wire_out = host.output(out);
  Transfer t = begin(CommKind::AllGatherIntoTensor, in.scalar_type());
  const Bytes input = bytes_of(wire_in), all = bytes_of(wire_out);
  TESSERA_CHECK(all.size == input.size * getSize(), UsageError, "all_gather on ", getSize(), " ranks: output of ",
                all.size, " bytes for an input of ", input.size);
  t.inputs.push_back(input);
  for (int r = 0; r < getSize(); r++) t.outputs.push_back(part(all, r, getSize()));
  t.keep = {wire_out, wire_in};
  return run(std::move(t), host, {out});
}

RegionBackend::WorkPtr RegionBackend::allgather(std::vector<Tensors>& outs, Tensors& ins,
                                                const c10d::AllgatherOptions&) {
  TESSERA_CHECK(outs.size() == 1 && static_cast<int>(outs[0].size()) == getSize(), UsageError, "allgather needs ",
                getSize(), " outputs");
  HostTensors host;
  const at::Tensor in = host.input(single(ins));
  Transfer t = begin(CommKind::AllGather, in.scalar_type());
  t.inputs.push_back(bytes_of(in));
  t.keep = {in};
  for (const auto& out : outs[0]) t.outputs.push_back(bytes_of(t.keep.emplace_back(host.output(out))));
  return run(std::move(t), host, outs[0]);
}

RegionBackend::WorkPtr RegionBackend::allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                                      const c10d::AllgatherOptions& options) {
  TESSERA_CHECK(outs.size() == ins.size(), UsageError, "allgather_into_tensor_coalesced: ", ins.size(), " inputs but ",
                outs.size(), " outputs");
  if (ins.size() == 1) return _allgather_base(outs[0], ins[0], options);
  if (ins.empty()) return c10::make_intrusive<DoneWork>(outs);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors parts;
  for (size_t i = 0; i < ins.size(); i++) {
    TESSERA_CHECK(outs[i].nbytes() == ins[i].nbytes() * static_cast<size_t>(getSize()), UsageError,
                  "allgather_into_tensor_coalesced on ", getSize(), " ranks: output ", i, " has ", outs[i].nbytes(),
                  " bytes for an input of ", ins[i].nbytes());
    TESSERA_CHECK(outs[i].is_contiguous(), UsageError, "allgather_into_tensor_coalesced: output ", i,
                  " is not contiguous");
    parts.push_back(detail::as_bytes(ins[i]));
  }
  const at::Tensor in = at::cat(parts), out = at::empty({getSize(), in.numel()}, in.options());
  HostTensors host;
  const at::Tensor wire_in = host.input(in), wire_out = host.output(out);
  Transfer t = begin(CommKind::AllGatherCoalesced, ins[0].scalar_type());
  t.inputs.push_back(bytes_of(wire_in));
  for (int r = 0; r < getSize(); r++) t.outputs.push_back(part(bytes_of(wire_out), r, getSize()));
  t.keep = {wire_out, wire_in};
  t.finish = [outs, out, n = getSize()] {
    int64_t offset = 0;
    for (const auto& each : outs) {
      const int64_t bytes = static_cast<int64_t>(each.nbytes()) / n;
      detail::as_bytes(each).view({n, -1}).copy_(out.narrow(1, offset, bytes));
      offset += bytes;
    }
  };
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::gather(std::vector<Tensors>& outs, Tensors& ins,
                                             const c10d::GatherOptions& options) {
  HostTensors host;
  const at::Tensor in = host.input(single(ins));
  Transfer t = begin(CommKind::Gather, in.scalar_type());
  t.fingerprint.root = static_cast<int32_t>(options.rootRank);
  t.inputs.push_back(bytes_of(in));
  t.outputs.resize(static_cast<size_t>(getSize()));
  t.keep = {in};
  const bool target = getRank() == options.rootRank;
  if (target) {
    TESSERA_CHECK(outs.size() == 1 && static_cast<int>(outs[0].size()) == getSize(), UsageError, "gather needs ",
                  getSize(), " outputs at its root");
    for (size_t r = 0; r < t.outputs.size(); r++) t.outputs[r] = bytes_of(t.keep.emplace_back(host.output(outs[0][r])));
  }
  return run(std::move(t), host, target ? outs[0] : Tensors());
}

RegionBackend::WorkPtr RegionBackend::scatter(Tensors& outs, std::vector<Tensors>& ins,
                                              const c10d::ScatterOptions& options) {
  HostTensors host;
  const at::Tensor out = host.output(single(outs));
  Transfer t = begin(CommKind::Scatter, out.scalar_type());
  t.fingerprint.root = static_cast<int32_t>(options.rootRank);
  t.per_rank_inputs = true;
  t.inputs.resize(static_cast<size_t>(getSize()));
  t.outputs.resize(static_cast<size_t>(getSize()));
  t.outputs[static_cast<size_t>(options.rootRank)] = bytes_of(out);
  t.keep = {out};
  if (getRank() == options.rootRank) {
    TESSERA_CHECK(ins.size() == 1 && static_cast<int>(ins[0].size()) == getSize(), UsageError, "scatter needs ",
                  getSize(), " inputs at its root");
    for (size_t r = 0; r < t.inputs.size(); r++) t.inputs[r] = bytes_of(t.keep.emplace_back(host.input(ins[0][r])));
  }
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                           const c10d::ReduceScatterOptions& options) {
  if (stays_on_device(getSize(), out) && out.numel() == in.numel()) return copied_on_device(out, in);
  HostTensors host;
  const at::Tensor wire_in = host.input(in), wire_out = host.output(out);
  Transfer t = begin(CommKind::ReduceScatterTensor, in.scalar_type());
  t.fingerprint.reduce_op = wire(options.reduceOp);
  t.per_rank_inputs = t.reduced = true;
  const Bytes all = bytes_of(wire_in), output = bytes_of(wire_out);
  TESSERA_CHECK(all.size == output.size * getSize(), UsageError, "reduce_scatter on ", getSize(), " ranks: input of ",
                all.size, " bytes for an output of ", output.size);
  for (int r = 0; r < getSize(); r++) t.inputs.push_back(part(all, r, getSize()));
  t.outputs.push_back(output);
  t.keep = {wire_out, wire_in};
  return run(std::move(t), host, {out});
}

RegionBackend::WorkPtr RegionBackend::reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                                                     const c10d::ReduceScatterOptions& options) {
  TESSERA_CHECK(ins.size() == 1 && static_cast<int>(ins[0].size()) == getSize(), UsageError, "reduce_scatter needs ",
                getSize(), " inputs");
  HostTensors host;
  const at::Tensor out = host.output(single(outs));
  Transfer t = begin(CommKind::ReduceScatter, out.scalar_type());
  t.fingerprint.reduce_op = wire(options.reduceOp);
  t.per_rank_inputs = t.reduced = true;
  t.outputs.push_back(bytes_of(out));
  t.keep = {out};
  for (const auto& in : ins[0]) t.inputs.push_back(bytes_of(t.keep.emplace_back(host.input(in))));
  TESSERA_CHECK(t.inputs[static_cast<size_t>(getRank())].size == t.outputs[0].size, UsageError,
                "reduce_scatter: this rank's input for itself has ", t.inputs[static_cast<size_t>(getRank())].size,
                " bytes but its output has ", t.outputs[0].size);
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                                      const c10d::ReduceScatterOptions& options) {
  TESSERA_CHECK(outs.size() == ins.size(), UsageError, "reduce_scatter_tensor_coalesced: ", ins.size(), " inputs but ",
                outs.size(), " outputs");
  if (ins.size() == 1) return _reduce_scatter_base(outs[0], ins[0], options);
  if (ins.empty()) return c10::make_intrusive<DoneWork>(outs);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors parts;  // (size, n_i) each
  for (size_t i = 0; i < ins.size(); i++) {
    TESSERA_CHECK(ins[i].numel() == outs[i].numel() * getSize() && ins[i].scalar_type() == ins[0].scalar_type() &&
                      outs[i].scalar_type() == ins[0].scalar_type(),
                  UsageError, "reduce_scatter_tensor_coalesced on ", getSize(), " ranks: input ", i, " is ",
                  ins[i].sizes(), " ", ins[i].scalar_type(), ", output ", outs[i].sizes(), " ", outs[i].scalar_type(),
                  "; all tensors must have one dtype, and an input must have ", getSize(),
                  " times the elements of its output");
    parts.push_back(ins[i].reshape({getSize(), -1}));
  }
  const at::Tensor in = at::cat(parts, 1), out = at::empty({in.size(1)}, in.options());
  HostTensors host;
  const at::Tensor wire_in = host.input(in), wire_out = host.output(out);
  Transfer t = begin(CommKind::ReduceScatterCoalesced, in.scalar_type());
  t.fingerprint.reduce_op = wire(options.reduceOp);
  t.per_rank_inputs = t.reduced = true;
  for (int r = 0; r < getSize(); r++) t.inputs.push_back(part(bytes_of(wire_in), r, getSize()));
  t.outputs.push_back(bytes_of(wire_out));
  t.keep = {wire_out, wire_in};
  t.finish = [outs, out] { detail::unflatten_into(outs, out); };
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::allgather_segments(const Tensors& outs, const Segments& segments,
                                                         const at::Tensor& in) {
  HostTensors host;
  const at::Tensor wire_in = host.input(in);
  Transfer t = begin(CommKind::AllGatherIntoTensor, in.scalar_type());
  t.inputs.push_back(bytes_of(wire_in));
  for (const auto& out : outs) t.keep.push_back(host.output(out));
  for (const auto& of_rank : segments)
    t.outputs.push_back(bytes_of(of_rank, t.keep, static_cast<int64_t>(in.itemsize()), nullptr));
  t.keep.push_back(wire_in);
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::reduce_scatter_segments(const at::Tensor& out, const Tensors& ins,
                                                              const Segments& segments,
                                                              const c10d::ReduceScatterOptions& options) {
  HostTensors host;
  const at::Tensor wire_out = host.output(out);
  Transfer t = begin(CommKind::ReduceScatterTensor, out.scalar_type());
  t.fingerprint.reduce_op = wire(options.reduceOp);
  t.per_rank_inputs = t.reduced = true;
  for (const auto& in : ins) t.keep.push_back(host.input(in));
  int64_t padding = 0;
  for (const auto& of_rank : segments)
    for (const BufferSegment& segment : of_rank)
      if (segment.tensor == kPaddingSegment) padding = std::max(padding, segment.size);
  const auto zeros = at::zeros({padding}, wire_out.options());
  for (const auto& of_rank : segments)
    t.inputs.push_back(
        bytes_of(of_rank, t.keep, static_cast<int64_t>(out.itemsize()), static_cast<char*>(zeros.data_ptr())));
  t.outputs.push_back(bytes_of(wire_out));
  t.keep.push_back(zeros);
  t.keep.push_back(wire_out);
  return run(std::move(t), host, {out});
}

RegionBackend::WorkPtr RegionBackend::alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                                                    std::vector<int64_t>& in_splits, const c10d::AllToAllOptions&) {
  HostTensors host;
  const at::Tensor wire_in = host.input(in), wire_out = host.output(out);
  Transfer t = begin(CommKind::AllToAllSingle, in.scalar_type());
  t.per_rank_inputs = true;
  const auto split = [&](const at::Tensor& x, const std::vector<int64_t>& splits, BytesList& list) {
    Bytes rest = bytes_of(x);
    const int64_t row = x.dim() && x.size(0) ? rest.size / x.size(0) : 0;
    const int64_t even = rest.size / getSize();
    for (int r = 0; r < getSize(); r++) {
      const int64_t n = splits.empty() ? even : splits.at(static_cast<size_t>(r)) * row;
      list.push_back({rest.data, n});
      rest.data += n;
      rest.size -= n;
    }
    TESSERA_CHECK(rest.size == 0, UsageError, "alltoall_base: ", x.sizes(), " rows do not match the splits ", splits,
                  " for ", getSize(), " ranks");
  };
  split(wire_in, in_splits, t.inputs);
  split(wire_out, out_splits, t.outputs);
  t.keep = {wire_out, wire_in};
  return run(std::move(t), host, {out});
}

RegionBackend::WorkPtr RegionBackend::alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions&) {
  TESSERA_CHECK(static_cast<int>(ins.size()) == getSize() && ins.size() == outs.size(), UsageError, "alltoall needs ",
                getSize(), " inputs and outputs");
  HostTensors host;
  Transfer t = begin(CommKind::AllToAll, ins[0].scalar_type());
  t.per_rank_inputs = true;
  for (const auto& in : ins) t.inputs.push_back(bytes_of(t.keep.emplace_back(host.input(in))));
  for (const auto& out : outs) t.outputs.push_back(bytes_of(t.keep.emplace_back(host.output(out))));
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::send(Tensors& xs, int to, int tag) {
  TESSERA_CHECK(to >= 0 && to < getSize() && to != getRank(), UsageError, "send to rank ", to, " of a group of ",
                getSize(), ", from rank ", getRank());
  HostTensors host;
  const at::Tensor x = host.input(single(xs));
  Transfer t = begin(CommKind::Send, x.scalar_type());
  t.fingerprint.tag = tag;
  t.inputs.push_back(bytes_of(x));
  t.keep = {x};
  auto operation = exchange("send").post_send(std::move(t), to);
  return c10::make_intrusive<RegionWork>(exchange_, std::move(operation), xs);
}

RegionBackend::WorkPtr RegionBackend::recv(Tensors& xs, int from, int tag) {
  TESSERA_CHECK(from >= 0 && from < getSize() && from != getRank(), UsageError, "recv from rank ", from,
                " of a group of ", getSize(), ", on rank ", getRank());
  HostTensors host;
  const at::Tensor x = host.output(single(xs));
  Transfer t = begin(CommKind::Recv, x.scalar_type());
  t.fingerprint.tag = tag;
  t.outputs.push_back(bytes_of(x));
  t.keep = {x};
  t.finish = host.finish();
  auto operation = exchange("recv").post_recv(std::move(t), from);
  return c10::make_intrusive<RegionWork>(exchange_, std::move(operation), xs);
}

RegionBackend::WorkPtr RegionBackend::barrier(const c10d::BarrierOptions&) {
  HostTensors host;
  Transfer t = begin(CommKind::Barrier, c10::ScalarType::Undefined);
  t.inputs.push_back({});
  t.outputs.resize(static_cast<size_t>(getSize()));
  return run(std::move(t), host, {});
}

}  // namespace tessera::comm::region
