#include "tessera/comm/region/backend.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/posting.h"

#include <cstring>

namespace tessera::comm::region {
namespace {

struct DoneWork final : c10d::Work {
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    return future;
  }
};

struct RegionWork final : c10d::Work {
  RegionWork(std::shared_ptr<Exchange> exchange, OperationPtr operation, std::vector<at::Tensor> results)
      : exchange_(std::move(exchange)), operation_(std::move(operation)), results_(std::move(results)) {}

  bool isCompleted() override { return exchange_->poll(*operation_); }
  bool isSuccess() const override { return operation_->done && operation_->error.empty(); }
  bool wait(std::chrono::milliseconds timeout) override {
    exchange_->wait(*operation_, timeout == kNoTimeout ? exchange_->timeout() : timeout);
    return true;
  }
  std::vector<at::Tensor> result() override { return results_; }
  // Nobody but the waiting rank moves the bytes, so a future has to be complete when it is handed out.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  std::shared_ptr<Exchange> exchange_;
  OperationPtr operation_;
  std::vector<at::Tensor> results_;
};

void check(const at::Tensor& x) {
  TESSERA_CHECK(x.is_contiguous() && x.device().is_cpu(), UsageError,
                "this backend moves contiguous CPU tensors; found one on ", x.device(),
                x.is_contiguous() ? "" : " that is not contiguous");
}
const at::Tensor& single(const std::vector<at::Tensor>& xs) {
  TESSERA_CHECK(xs.size() == 1, UsageError, "one tensor a rank; found ", xs.size());
  check(xs[0]);
  return xs[0];
}

Bytes bytes_of(const at::Tensor& x) {
  check(x);
  return {static_cast<char*>(x.data_ptr()), static_cast<int64_t>(x.nbytes())};
}
// Part r of n equal ones.
Bytes part(const Bytes& whole, int r, int n) { return {whole.data + whole.size / n * r, whole.size / n}; }

uint8_t wire(const c10d::ReduceOp& op) { return static_cast<uint8_t>(static_cast<c10d::ReduceOp::RedOpType>(op)); }
constexpr uint8_t number(Kind kind) { return static_cast<uint8_t>(kind); }

}  // namespace

RegionBackend::RegionBackend(std::string name, int rank, int size, std::shared_ptr<Region> region, Names names,
                             std::chrono::milliseconds timeout)
    : Backend(rank, size), name_(std::move(name)), region_(std::move(region)), done_(c10::make_intrusive<DoneWork>()) {
  if (region_) exchange_ = std::make_shared<Exchange>(region_, rank, std::move(names), timeout);
}
RegionBackend::~RegionBackend() = default;

void RegionBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (exchange_) exchange_->set_timeout(timeout);
}
void RegionBackend::shutdown() {
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

Stamp RegionBackend::stamp(uint8_t kind, c10::ScalarType dtype) {
  Stamp s{};
  s.sequence = calls_++;
  s.kind = kind;
  s.family = static_cast<uint8_t>(Family::C10d);
  s.dtype = static_cast<uint8_t>(dtype);
  s.root = -1;
  if (const auto* posting = detail::posting) {
    s.sequence = posting->sequence;
    s.kind = static_cast<uint8_t>(posting->kind);
    s.family = static_cast<uint8_t>(posting->family);
    s.tag = posting->number;
    std::strncpy(s.tensor_name, posting->tensor_name, sizeof(s.tensor_name) - 1);
  }
  return s;
}

RegionBackend::WorkPtr RegionBackend::run(Transfer&& t) {
  if (t.reduced) check_reducible(static_cast<WireOp>(t.stamp.reduce_op), static_cast<c10::ScalarType>(t.stamp.dtype));
  if (getSize() == 1) {
    if (!t.gives.empty() && t.takes[0].data && t.takes[0].data != t.gives[0].data)
      std::memmove(t.takes[0].data, t.gives[0].data, static_cast<size_t>(t.takes[0].size));
    return done_;
  }
  auto results = t.keep;
  auto operation = exchange("a collective").post(std::move(t));
  return c10::make_intrusive<RegionWork>(exchange_, std::move(operation), std::move(results));
}

RegionBackend::WorkPtr RegionBackend::broadcast(Tensors& xs, const c10d::BroadcastOptions& options) {
  const at::Tensor& x = single(xs);
  Transfer t;
  t.stamp = stamp(number(Kind::Broadcast), x.scalar_type());
  t.stamp.root = static_cast<int32_t>(options.rootRank);
  const bool source = getRank() == options.rootRank;
  t.gives.push_back(source ? bytes_of(x) : Bytes{});
  t.takes.resize(static_cast<size_t>(getSize()));
  if (!source) t.takes[static_cast<size_t>(options.rootRank)] = bytes_of(x);
  t.keep = xs;
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::allreduce(Tensors& xs, const c10d::AllreduceOptions& options) {
  const at::Tensor& x = single(xs);
  Transfer t;
  t.stamp = stamp(number(Kind::AllReduce), x.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.reduced = true;
  t.gives.push_back(bytes_of(x));
  t.takes.push_back(bytes_of(x));
  t.keep = xs;
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& options) {
  WorkPtr last = done_;
  for (auto& x : xs) {
    Tensors one{x};
    (last = allreduce(one, options))->wait();
  }
  return last;
}

RegionBackend::WorkPtr RegionBackend::reduce(Tensors& xs, const c10d::ReduceOptions& options) {
  const at::Tensor& x = single(xs);
  Transfer t;
  t.stamp = stamp(number(Kind::Reduce), x.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.stamp.root = static_cast<int32_t>(options.rootRank);
  t.reduced = true;
  t.gives.push_back(bytes_of(x));
  t.takes.push_back(getRank() == options.rootRank ? bytes_of(x) : Bytes{});
  t.keep = xs;
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::_allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) {
  Transfer t;
  t.stamp = stamp(number(Kind::AllGatherIntoTensor), in.scalar_type());
  const Bytes give = bytes_of(in), all = bytes_of(out);
  TESSERA_CHECK(all.size == give.size * getSize(), UsageError, "all_gather on ", getSize(), " ranks: output of ",
                all.size, " bytes for an input of ", give.size);
  t.gives.push_back(give);
  for (int r = 0; r < getSize(); r++) t.takes.push_back(part(all, r, getSize()));
  if (getSize() > 1) t.keep = {out, in};
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::allgather(std::vector<Tensors>& outs, Tensors& ins,
                                                const c10d::AllgatherOptions&) {
  TESSERA_CHECK(outs.size() == 1 && static_cast<int>(outs[0].size()) == getSize(), UsageError, "allgather needs ",
                getSize(), " outputs");
  const at::Tensor& in = single(ins);
  Transfer t;
  t.stamp = stamp(number(Kind::AllGather), in.scalar_type());
  t.gives.push_back(bytes_of(in));
  for (const auto& out : outs[0]) t.takes.push_back(bytes_of(out));
  t.keep = outs[0];
  t.keep.push_back(in);
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                                      const c10d::AllgatherOptions& options) {
  WorkPtr last = done_;
  for (size_t i = 0; i < ins.size(); i++) (last = _allgather_base(outs[i], ins[i], options))->wait();
  return last;
}

RegionBackend::WorkPtr RegionBackend::gather(std::vector<Tensors>& outs, Tensors& ins,
                                             const c10d::GatherOptions& options) {
  const at::Tensor& in = single(ins);
  Transfer t;
  t.stamp = stamp(number(Kind::Gather), in.scalar_type());
  t.stamp.root = static_cast<int32_t>(options.rootRank);
  t.gives.push_back(bytes_of(in));
  t.takes.resize(static_cast<size_t>(getSize()));
  t.keep = ins;
  if (getRank() == options.rootRank) {
    TESSERA_CHECK(outs.size() == 1 && static_cast<int>(outs[0].size()) == getSize(), UsageError, "gather needs ",
                  getSize(), " outputs at its root");
    for (size_t r = 0; r < t.takes.size(); r++) t.takes[r] = bytes_of(outs[0][r]);
    t.keep.insert(t.keep.end(), outs[0].begin(), outs[0].end());
  }
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::scatter(Tensors& outs, std::vector<Tensors>& ins,
                                              const c10d::ScatterOptions& options) {
  const at::Tensor& out = single(outs);
  Transfer t;
  t.stamp = stamp(number(Kind::Scatter), out.scalar_type());
  t.stamp.root = static_cast<int32_t>(options.rootRank);
  t.pieces = true;
  t.gives.resize(static_cast<size_t>(getSize()));
  t.takes.resize(static_cast<size_t>(getSize()));
  t.takes[static_cast<size_t>(options.rootRank)] = bytes_of(out);
  t.keep = outs;
  if (getRank() == options.rootRank) {
    TESSERA_CHECK(ins.size() == 1 && static_cast<int>(ins[0].size()) == getSize(), UsageError, "scatter needs ",
                  getSize(), " inputs at its root");
    for (size_t r = 0; r < t.gives.size(); r++) t.gives[r] = bytes_of(ins[0][r]);
    t.keep.insert(t.keep.end(), ins[0].begin(), ins[0].end());
  }
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                           const c10d::ReduceScatterOptions& options) {
  Transfer t;
  t.stamp = stamp(number(Kind::ReduceScatterTensor), in.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.pieces = t.reduced = true;
  const Bytes all = bytes_of(in), take = bytes_of(out);
  TESSERA_CHECK(all.size == take.size * getSize(), UsageError, "reduce_scatter on ", getSize(), " ranks: input of ",
                all.size, " bytes for an output of ", take.size);
  for (int r = 0; r < getSize(); r++) t.gives.push_back(part(all, r, getSize()));
  t.takes.push_back(take);
  if (getSize() > 1) t.keep = {out, in};
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                                                     const c10d::ReduceScatterOptions& options) {
  TESSERA_CHECK(ins.size() == 1 && static_cast<int>(ins[0].size()) == getSize(), UsageError, "reduce_scatter needs ",
                getSize(), " inputs");
  const at::Tensor& out = single(outs);
  Transfer t;
  t.stamp = stamp(number(Kind::ReduceScatter), out.scalar_type());
  t.stamp.reduce_op = wire(options.reduceOp);
  t.pieces = t.reduced = true;
  for (const auto& in : ins[0]) t.gives.push_back(bytes_of(in));
  t.takes.push_back(bytes_of(out));
  t.keep = ins[0];
  t.keep.push_back(out);
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                                      const c10d::ReduceScatterOptions& options) {
  WorkPtr last = done_;
  for (size_t i = 0; i < ins.size(); i++) (last = _reduce_scatter_base(outs[i], ins[i], options))->wait();
  return last;
}

RegionBackend::WorkPtr RegionBackend::alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                                                    std::vector<int64_t>& in_splits, const c10d::AllToAllOptions&) {
  Transfer t;
  t.stamp = stamp(number(Kind::AllToAllSingle), in.scalar_type());
  t.pieces = true;
  const auto cut = [&](const at::Tensor& x, const std::vector<int64_t>& splits, BytesList& list) {
    Bytes rest = bytes_of(x);
    const int64_t row = x.dim() && x.size(0) ? rest.size / x.size(0) : 0;
    const int64_t even = rest.size / getSize();
    for (int r = 0; r < getSize(); r++) {
      const int64_t n = splits.empty() ? even : splits[static_cast<size_t>(r)] * row;
      list.push_back({rest.data, n});
      rest.data += n;
    }
  };
  cut(in, in_splits, t.gives);
  cut(out, out_splits, t.takes);
  t.keep = {out, in};
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions&) {
  TESSERA_CHECK(static_cast<int>(ins.size()) == getSize() && ins.size() == outs.size(), UsageError, "alltoall needs ",
                getSize(), " inputs and outputs");
  Transfer t;
  t.stamp = stamp(number(Kind::AllToAll), ins[0].scalar_type());
  t.pieces = true;
  for (const auto& in : ins) t.gives.push_back(bytes_of(in));
  for (const auto& out : outs) t.takes.push_back(bytes_of(out));
  t.keep = outs;
  t.keep.insert(t.keep.end(), ins.begin(), ins.end());
  return run(std::move(t));
}

RegionBackend::WorkPtr RegionBackend::send(Tensors& xs, int to, int tag) {
  const at::Tensor& x = single(xs);
  TESSERA_CHECK(to >= 0 && to < getSize() && to != getRank(), UsageError, "send to rank ", to, " of a group of ",
                getSize(), ", from rank ", getRank());
  Transfer t;
  t.stamp = stamp(number(Kind::Send), x.scalar_type());
  t.stamp.tag = tag;
  t.gives.push_back(bytes_of(x));
  t.keep = xs;
  auto operation = exchange("send").post_send(std::move(t), to);
  return c10::make_intrusive<RegionWork>(exchange_, std::move(operation), xs);
}

RegionBackend::WorkPtr RegionBackend::recv(Tensors& xs, int from, int tag) {
  const at::Tensor& x = single(xs);
  TESSERA_CHECK(from >= 0 && from < getSize() && from != getRank(), UsageError, "recv from rank ", from,
                " of a group of ", getSize(), ", on rank ", getRank());
  Transfer t;
  t.stamp = stamp(number(Kind::Recv), x.scalar_type());
  t.stamp.tag = tag;
  t.takes.push_back(bytes_of(x));
  t.keep = xs;
  auto operation = exchange("recv").post_recv(std::move(t), from);
  return c10::make_intrusive<RegionWork>(exchange_, std::move(operation), xs);
}

RegionBackend::WorkPtr RegionBackend::barrier(const c10d::BarrierOptions&) {
  Transfer t;
  t.stamp = stamp(number(Kind::Barrier), c10::ScalarType::Undefined);
  t.gives.push_back({});
  t.takes.resize(static_cast<size_t>(getSize()));
  return run(std::move(t));
}

}  // namespace tessera::comm::region
