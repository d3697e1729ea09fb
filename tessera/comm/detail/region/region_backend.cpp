#include "tessera/comm/detail/region/region_backend.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/region/collective_stamp.h"

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
  TESSERA_CHECK(xs.size() == 1, UsageError, "one tensor a rank; found ", xs.size());
  return xs[0];
}

Bytes bytes_of(const at::Tensor& x) { return {static_cast<char*>(x.data_ptr()), static_cast<int64_t>(x.nbytes())}; }
// Part r of n equal ones.
Bytes part(const Bytes& whole, int r, int n) { return {whole.data + whole.size / n * r, whole.size / n}; }

// `padding`: where the bytes of padding are; null: nowhere.
Bytes bytes_of(const std::vector<Run>& runs, const Tensors& tensors, int64_t element, char* padding) {
  Bytes all;
  all.parts.reserve(runs.size());
  for (const Run& run : runs) {
    char* from = run.tensor == kPadding
                     ? padding
                     : static_cast<char*>(tensors[static_cast<size_t>(run.tensor)].data_ptr()) + run.begin * element;
    if (run.size > 0) all.parts.push_back({from, run.size * element});
    all.size += run.size * element;
  }
  static char not_null;
  all.data = &not_null;
  return all;
}

uint8_t wire(const c10d::ReduceOp& op) { return static_cast<uint8_t>(static_cast<c10d::ReduceOp::RedOpType>(op)); }

bool overlap(const Bytes& a, const Bytes& b) {
  bool found = false;
  for_each_piece(a, 0, a.size, [&](const char* from, int64_t n) {
    for_each_piece(b, 0, b.size,
                   [&](const char* to, int64_t m) { found |= from && to && from < to + m && to < from + n; });
  });
  return found;
}

// Chunks are taken while others are still to be given, so the two must not share memory, except where the same bytes
// go from a rank to itself. An all_reduce gives a chunk before it takes it.
void part_gives_from_takes(Transfer& t, int rank) {
  if (t.reduced && !t.pieces) return;
  const size_t own_give = t.pieces ? static_cast<size_t>(rank) : 0,
               own_take = t.reduced ? 0 : static_cast<size_t>(rank);
  bool shared = false;
  int64_t total = 0;
  for (size_t g = 0; g < t.gives.size(); g++) {
    total += t.gives[g].size;
    for (size_t k = 0; k < t.takes.size(); k++)
      shared |=
          overlap(t.gives[g], t.takes[k]) && !(g == own_give && k == own_take && t.gives[g].data == t.takes[k].data);
  }
  if (!shared) return;
  at::Tensor apart = at::empty({total}, at::kByte);
  char* to = static_cast<char*>(apart.data_ptr());
  for (Bytes& give : t.gives) {
    copy_out(give, 0, give.size, to);
    give = {to, give.size};
    to += give.size;
  }
  t.keep.push_back(apart);
}

at::Tensor as_bytes(const at::Tensor& x) { return x.reshape({-1}).view(at::kByte); }

// First one, then the other.
std::function<void()> both(std::function<void()> first, std::function<void()> second) {
  if (!first) return second;
  if (!second) return first;
  return [first = std::move(first), second = std::move(second)] {
    first();
    second();
  };
}

}  // namespace

RegionBackend::RegionBackend(std::string name, int rank, int size, std::shared_ptr<Region> region, Names names,
                             Exchange::Options options)
    : Backend(rank, size), name_(std::move(name)), region_(std::move(region)) {
  if (region_) exchange_ = std::make_shared<Exchange>(region_, rank, std::move(names), options);
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
void RegionBackend::poison(const std::string& reason) {
  if (region_) region_->poison(reason);
}

Exchange& RegionBackend::exchange(const char* what) {
  TESSERA_CHECK(exchange_, UsageError, what,
                getSize() == 1 ? " needs a peer; this group has one rank" : " on a closed group");
  return *exchange_;
}

Transfer RegionBackend::begin(Kind kind, c10::ScalarType dtype) {
  Transfer t;
  t.stamp = stamp_of(kind, dtype, calls_++);
  return t;
}

RegionBackend::WorkPtr RegionBackend::run(Transfer&& t, HostTensors& host, Tensors results) {
  if (t.reduced) check_reducible(static_cast<WireOp>(t.stamp.reduce_op), static_cast<c10::ScalarType>(t.stamp.dtype));
  t.finish = both(host.finish(), std::move(t.finish));
  if (getSize() == 1) {
    if (!t.gives.empty() && t.takes[0].data && t.takes[0].data != t.gives[0].data)
      std::memmove(t.takes[0].data, t.gives[0].data, static_cast<size_t>(t.takes[0].size));
    if (t.finish) t.finish();
    return c10::make_intrusive<DoneWork>(std::move(results));
  }
  part_gives_from_takes(t, getRank());
  auto operation = exchange("a collective").post(std::move(t));
  return c10::make_intrusive<RegionWork>(exchange_, std::move(operation), std::move(results));
}

RegionBackend::WorkPtr RegionBackend::broadcast(Tensors& xs, const c10d::BroadcastOptions& options) {
  HostTensors host;
  const bool source = getRank() == options.rootRank;
  const at::Tensor x = source ? host.given(single(xs)) : host.taken(single(xs));
  Transfer t = begin(Kind::Broadcast, x.scalar_type());
  t.stamp.root = static_cast<int32_t>(options.rootRank);
  t.gives.push_back(source ? bytes_of(x) : Bytes{});
  t.takes.resize(static_cast<size_t>(getSize()));
  if (!source) t.takes[static_cast<size_t>(options.rootRank)] = bytes_of(x);
  t.keep = {x};
  return run(std::move(t), host, xs);
}

RegionBackend::WorkPtr RegionBackend::allreduce(Tensors& xs, const c10d::AllreduceOptions& options) {
  HostTensors host;
  const at::Tensor x = host.both(single(xs));
  Transfer t = begin(Kind::AllReduce, x.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.reduced = true;
  t.gives.push_back(bytes_of(x));
  t.takes.push_back(bytes_of(x));
  t.keep = {x};
  return run(std::move(t), host, xs);
}

RegionBackend::WorkPtr RegionBackend::allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& options) {
  if (xs.size() == 1) return allreduce(xs, options);
  if (xs.empty()) return c10::make_intrusive<DoneWork>(xs);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors flat;
  for (const auto& x : xs) {
    TESSERA_CHECK(x.scalar_type() == xs[0].scalar_type(), UsageError, "allreduce_coalesced of ", xs[0].scalar_type(),
                  " and ", x.scalar_type(), " tensors together; give one list for each dtype");
    flat.push_back(x.reshape({-1}));
  }
  const at::Tensor all = at::cat(flat);
  HostTensors host;
  const at::Tensor wire_all = host.both(all);
  Transfer t = begin(Kind::AllReduceCoalesced, all.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.reduced = true;
  t.gives.push_back(bytes_of(wire_all));
  t.takes.push_back(bytes_of(wire_all));
  t.keep = {wire_all};
  t.finish = [xs, all] {
    int64_t offset = 0;
    for (const auto& x : xs) {
      x.copy_(all.narrow(0, offset, x.numel()).view(x.sizes()));
      offset += x.numel();
    }
  };
  return run(std::move(t), host, xs);
}

RegionBackend::WorkPtr RegionBackend::reduce(Tensors& xs, const c10d::ReduceOptions& options) {
  HostTensors host;
  const bool target = getRank() == options.rootRank;
  const at::Tensor x = target ? host.both(single(xs)) : host.given(single(xs));
  Transfer t = begin(Kind::Reduce, x.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.stamp.root = static_cast<int32_t>(options.rootRank);
  t.reduced = true;
  t.gives.push_back(bytes_of(x));
  t.takes.push_back(target ? bytes_of(x) : Bytes{});
  t.keep = {x};
  return run(std::move(t), host, xs);
}

RegionBackend::WorkPtr RegionBackend::_allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) {
  HostTensors host;
  const at::Tensor wire_in = host.given(in), wire_out = host.taken(out);
  Transfer t = begin(Kind::AllGatherIntoTensor, in.scalar_type());
  const Bytes give = bytes_of(wire_in), all = bytes_of(wire_out);
  TESSERA_CHECK(all.size == give.size * getSize(), UsageError, "all_gather on ", getSize(), " ranks: output of ",
                all.size, " bytes for an input of ", give.size);
  t.gives.push_back(give);
  for (int r = 0; r < getSize(); r++) t.takes.push_back(part(all, r, getSize()));
  t.keep = {wire_out, wire_in};
  return run(std::move(t), host, {out});
}

RegionBackend::WorkPtr RegionBackend::allgather(std::vector<Tensors>& outs, Tensors& ins,
                                                const c10d::AllgatherOptions&) {
  TESSERA_CHECK(outs.size() == 1 && static_cast<int>(outs[0].size()) == getSize(), UsageError, "allgather needs ",
                getSize(), " outputs");
  HostTensors host;
  const at::Tensor in = host.given(single(ins));
  Transfer t = begin(Kind::AllGather, in.scalar_type());
  t.gives.push_back(bytes_of(in));
  t.keep = {in};
  for (const auto& out : outs[0]) t.takes.push_back(bytes_of(t.keep.emplace_back(host.taken(out))));
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
    parts.push_back(as_bytes(ins[i]));
  }
  const at::Tensor in = at::cat(parts), out = at::empty({getSize(), in.numel()}, in.options());
  HostTensors host;
  const at::Tensor wire_in = host.given(in), wire_out = host.taken(out);
  Transfer t = begin(Kind::AllGatherCoalesced, ins[0].scalar_type());
  t.gives.push_back(bytes_of(wire_in));
  for (int r = 0; r < getSize(); r++) t.takes.push_back(part(bytes_of(wire_out), r, getSize()));
  t.keep = {wire_out, wire_in};
  t.finish = [outs, out, n = getSize()] {
    int64_t offset = 0;
    for (const auto& each : outs) {
      const int64_t bytes = static_cast<int64_t>(each.nbytes()) / n;
      as_bytes(each).view({n, -1}).copy_(out.narrow(1, offset, bytes));
      offset += bytes;
    }
  };
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::gather(std::vector<Tensors>& outs, Tensors& ins,
                                             const c10d::GatherOptions& options) {
  HostTensors host;
  const at::Tensor in = host.given(single(ins));
  Transfer t = begin(Kind::Gather, in.scalar_type());
  t.stamp.root = static_cast<int32_t>(options.rootRank);
  t.gives.push_back(bytes_of(in));
  t.takes.resize(static_cast<size_t>(getSize()));
  t.keep = {in};
  const bool target = getRank() == options.rootRank;
  if (target) {
    TESSERA_CHECK(outs.size() == 1 && static_cast<int>(outs[0].size()) == getSize(), UsageError, "gather needs ",
                  getSize(), " outputs at its root");
    for (size_t r = 0; r < t.takes.size(); r++) t.takes[r] = bytes_of(t.keep.emplace_back(host.taken(outs[0][r])));
  }
  return run(std::move(t), host, target ? outs[0] : Tensors());
}

RegionBackend::WorkPtr RegionBackend::scatter(Tensors& outs, std::vector<Tensors>& ins,
                                              const c10d::ScatterOptions& options) {
  HostTensors host;
  const at::Tensor out = host.taken(single(outs));
  Transfer t = begin(Kind::Scatter, out.scalar_type());
  t.stamp.root = static_cast<int32_t>(options.rootRank);
  t.pieces = true;
  t.gives.resize(static_cast<size_t>(getSize()));
  t.takes.resize(static_cast<size_t>(getSize()));
  t.takes[static_cast<size_t>(options.rootRank)] = bytes_of(out);
  t.keep = {out};
  if (getRank() == options.rootRank) {
    TESSERA_CHECK(ins.size() == 1 && static_cast<int>(ins[0].size()) == getSize(), UsageError, "scatter needs ",
                  getSize(), " inputs at its root");
    for (size_t r = 0; r < t.gives.size(); r++) t.gives[r] = bytes_of(t.keep.emplace_back(host.given(ins[0][r])));
  }
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                           const c10d::ReduceScatterOptions& options) {
  HostTensors host;
  const at::Tensor wire_in = host.given(in), wire_out = host.taken(out);
  Transfer t = begin(Kind::ReduceScatterTensor, in.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.pieces = t.reduced = true;
  const Bytes all = bytes_of(wire_in), take = bytes_of(wire_out);
  TESSERA_CHECK(all.size == take.size * getSize(), UsageError, "reduce_scatter on ", getSize(), " ranks: input of ",
                all.size, " bytes for an output of ", take.size);
  for (int r = 0; r < getSize(); r++) t.gives.push_back(part(all, r, getSize()));
  t.takes.push_back(take);
  t.keep = {wire_out, wire_in};
  return run(std::move(t), host, {out});
}

RegionBackend::WorkPtr RegionBackend::reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                                                     const c10d::ReduceScatterOptions& options) {
  TESSERA_CHECK(ins.size() == 1 && static_cast<int>(ins[0].size()) == getSize(), UsageError, "reduce_scatter needs ",
                getSize(), " inputs");
  HostTensors host;
  const at::Tensor out = host.taken(single(outs));
  Transfer t = begin(Kind::ReduceScatter, out.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.pieces = t.reduced = true;
  t.takes.push_back(bytes_of(out));
  t.keep = {out};
  for (const auto& in : ins[0]) t.gives.push_back(bytes_of(t.keep.emplace_back(host.given(in))));
  TESSERA_CHECK(t.gives[static_cast<size_t>(getRank())].size == t.takes[0].size, UsageError,
                "reduce_scatter: this rank gives itself ", t.gives[static_cast<size_t>(getRank())].size,
                " bytes but its output has ", t.takes[0].size);
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
                  "; all must have one dtype, and an input ", getSize(), " times its output's elements");
    parts.push_back(ins[i].reshape({getSize(), -1}));
  }
  const at::Tensor in = at::cat(parts, 1), out = at::empty({in.size(1)}, in.options());
  HostTensors host;
  const at::Tensor wire_in = host.given(in), wire_out = host.taken(out);
  Transfer t = begin(Kind::ReduceScatterCoalesced, in.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.pieces = t.reduced = true;
  for (int r = 0; r < getSize(); r++) t.gives.push_back(part(bytes_of(wire_in), r, getSize()));
  t.takes.push_back(bytes_of(wire_out));
  t.keep = {wire_out, wire_in};
  t.finish = [outs, out] {
    int64_t offset = 0;
    for (const auto& each : outs) {
      each.copy_(out.narrow(0, offset, each.numel()).view(each.sizes()));
      offset += each.numel();
    }
  };
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::allgather_runs(const Tensors& outs, const Runs& runs, const at::Tensor& in) {
  HostTensors host;
  const at::Tensor wire_in = host.given(in);
  Transfer t = begin(Kind::AllGatherIntoTensor, in.scalar_type());
  t.gives.push_back(bytes_of(wire_in));
  for (const auto& out : outs) t.keep.push_back(host.taken(out));
  for (const auto& of_rank : runs)
    t.takes.push_back(bytes_of(of_rank, t.keep, static_cast<int64_t>(in.itemsize()), nullptr));
  t.keep.push_back(wire_in);
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::reduce_scatter_runs(const at::Tensor& out, const Tensors& ins, const Runs& runs,
                                                          const c10d::ReduceScatterOptions& options) {
  HostTensors host;
  const at::Tensor wire_out = host.taken(out);
  Transfer t = begin(Kind::ReduceScatterTensor, out.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.pieces = t.reduced = true;
  for (const auto& in : ins) t.keep.push_back(host.given(in));
  int64_t padding = 0;
  for (const auto& of_rank : runs)
    for (const Run& run : of_rank)
      if (run.tensor == kPadding) padding = std::max(padding, run.size);
  const auto zeros = at::zeros({padding}, wire_out.options());
  for (const auto& of_rank : runs)
    t.gives.push_back(
        bytes_of(of_rank, t.keep, static_cast<int64_t>(out.itemsize()), static_cast<char*>(zeros.data_ptr())));
  t.takes.push_back(bytes_of(wire_out));
  t.keep.push_back(zeros);
  t.keep.push_back(wire_out);
  return run(std::move(t), host, {out});
}

RegionBackend::WorkPtr RegionBackend::alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                                                    std::vector<int64_t>& in_splits, const c10d::AllToAllOptions&) {
  HostTensors host;
  const at::Tensor wire_in = host.given(in), wire_out = host.taken(out);
  Transfer t = begin(Kind::AllToAllSingle, in.scalar_type());
  t.pieces = true;
  const auto cut = [&](const at::Tensor& x, const std::vector<int64_t>& splits, BytesList& list) {
    Bytes rest = bytes_of(x);
    const int64_t row = x.dim() && x.size(0) ? rest.size / x.size(0) : 0;
    const int64_t even = rest.size / getSize();
    for (int r = 0; r < getSize(); r++) {
      const int64_t n = splits.empty() ? even : splits.at(static_cast<size_t>(r)) * row;
      list.push_back({rest.data, n});
      rest.data += n;
      rest.size -= n;
    }
    TESSERA_CHECK(rest.size == 0, UsageError, "alltoall_base: ", x.sizes(), " is not cut up by splits ", splits,
                  " into ", getSize(), " parts");
  };
  cut(wire_in, in_splits, t.gives);
  cut(wire_out, out_splits, t.takes);
  t.keep = {wire_out, wire_in};
  return run(std::move(t), host, {out});
}

RegionBackend::WorkPtr RegionBackend::alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions&) {
  TESSERA_CHECK(static_cast<int>(ins.size()) == getSize() && ins.size() == outs.size(), UsageError, "alltoall needs ",
                getSize(), " inputs and outputs");
  HostTensors host;
  Transfer t = begin(Kind::AllToAll, ins[0].scalar_type());
  t.pieces = true;
  for (const auto& in : ins) t.gives.push_back(bytes_of(t.keep.emplace_back(host.given(in))));
  for (const auto& out : outs) t.takes.push_back(bytes_of(t.keep.emplace_back(host.taken(out))));
  return run(std::move(t), host, outs);
}

RegionBackend::WorkPtr RegionBackend::send(Tensors& xs, int to, int tag) {
  TESSERA_CHECK(to >= 0 && to < getSize() && to != getRank(), UsageError, "send to rank ", to, " of a group of ",
                getSize(), ", from rank ", getRank());
  HostTensors host;
  const at::Tensor x = host.given(single(xs));
  Transfer t = begin(Kind::Send, x.scalar_type());
  t.stamp.tag = tag;
  t.gives.push_back(bytes_of(x));
  t.keep = {x};
  auto operation = exchange("send").post_send(std::move(t), to);
  return c10::make_intrusive<RegionWork>(exchange_, std::move(operation), xs);
}

RegionBackend::WorkPtr RegionBackend::recv(Tensors& xs, int from, int tag) {
  TESSERA_CHECK(from >= 0 && from < getSize() && from != getRank(), UsageError, "recv from rank ", from,
                " of a group of ", getSize(), ", on rank ", getRank());
  HostTensors host;
  const at::Tensor x = host.taken(single(xs));
  Transfer t = begin(Kind::Recv, x.scalar_type());
  t.stamp.tag = tag;
  t.takes.push_back(bytes_of(x));
  t.keep = {x};
  t.finish = host.finish();
  auto operation = exchange("recv").post_recv(std::move(t), from);
  return c10::make_intrusive<RegionWork>(exchange_, std::move(operation), xs);
}

RegionBackend::WorkPtr RegionBackend::barrier(const c10d::BarrierOptions&) {
  HostTensors host;
  Transfer t = begin(Kind::Barrier, c10::ScalarType::Undefined);
  t.gives.push_back({});
  t.takes.resize(static_cast<size_t>(getSize()));
  return run(std::move(t), host, {});
}

void RegionBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  barrier(options)->wait(options.timeout == c10d::kUnsetTimeout ? kNoTimeout : options.timeout);
}

}  // namespace tessera::comm::region
