#include "tessera/base/error.h"
#include "tessera/comm/detail/communicator_post.h"
#include "tessera/comm/detail/flat_tensors.h"
#include "tessera/comm/detail/wire_op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

// The collectives of Communicator. Each one brings its tensors into a form that every backend accepts: contiguous,
// equal parts, avg as a division before a sum. Then it posts one call, and copies the result back in wait() if
// necessary.
namespace tessera::comm {
namespace {

using detail::bytes_of;
using detail::check_same_dtype;
using detail::flatten;
using detail::unflatten_into;
using detail::wire_op;

void check_avg(ReduceOp op, const at::Tensor& x) {
  TESSERA_CHECK(op != ReduceOp::Avg || at::isFloatingType(x.scalar_type()) || at::isComplexType(x.scalar_type()),
                UsageError, "avg of a tensor of ", x.scalar_type(), " has no exact value; use sum, or a floating type");
}

// avg divides before it sums. Then all_gather(reduce_scatter(x)) equals all_reduce(x) bit for bit.
at::Tensor averaged(const at::Tensor& x, ReduceOp op, int64_t n) {
  check_avg(op, x);
  return op == ReduceOp::Avg && n > 1 ? x.div(n) : x;
}

// Backends split the large tensor of an all_gather or reduce_scatter along dim 0, and check that each part has the
// shape of the small tensor. If the shapes do not match, both are passed as flat tensors; the memory is the same.
bool splits_along_rows(const at::Tensor& large, const at::Tensor& small, int64_t n) {
  return small.dim() > 0 && large.dim() == small.dim() && large.size(0) == n * small.size(0) &&
         large.sizes().slice(1) == small.sizes().slice(1);
}

}  // namespace

Work Communicator::all_reduce(at::Tensor& x, ReduceOp op, Options options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_avg(op, x);
  if (op == ReduceOp::Avg && size() > 1) x.div_(size());
  Tensors wire{x.is_contiguous() ? x : x.contiguous()};
  c10d::AllreduceOptions c10d_options;
  c10d_options.reduceOp = wire_op(op, x.scalar_type(), size());
  Work work = post(CommKind::AllReduce, options, bytes_of(x), x.scalar_type(),
                   [&] { return backend_->allreduce(wire, c10d_options); });
  if (!wire[0].is_same(x)) work.then([x = x, wire = wire[0]]() mutable { x.copy_(wire); });
  return work;
}

Work Communicator::all_reduce_coalesced(Tensors xs, ReduceOp op, Options options) {
  if (xs.empty()) return Work();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_same_dtype("all_reduce_coalesced", xs);
  Tensors wire{averaged(flatten(xs), op, size())};
  c10d::AllreduceOptions c10d_options;
  c10d_options.reduceOp = wire_op(op, wire[0].scalar_type(), size());
  Work work = post(CommKind::AllReduceCoalesced, options, bytes_of(wire[0]), wire[0].scalar_type(),
                   [&] { return backend_->allreduce(wire, c10d_options); });
  work.then([xs = std::move(xs), flat = wire[0]] { unflatten_into(xs, flat); });
  return work;
}

Work Communicator::all_gather_into_tensor(at::Tensor& out, const at::Tensor& in, Options options) {
  TESSERA_CHECK(out.numel() == in.numel() * size() && out.scalar_type() == in.scalar_type(), UsageError,
                "all_gather_into_tensor on group '", name_, "' of ", size(), " ranks: the output must have ", size(),
                " times the input's elements and its dtype; found input ", in.sizes(), " ", in.scalar_type(),
                ", output ", out.sizes(), " ", out.scalar_type());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor wire_in = in.is_contiguous() ? in : in.contiguous();
  at::Tensor wire_out = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  const bool copy_back = !wire_out.is_same(out);
  if (!splits_along_rows(wire_out, wire_in, size())) {
    wire_in = wire_in.view({-1});
    wire_out = wire_out.view({-1});
  }
  Work work = post(CommKind::AllGatherIntoTensor, options, bytes_of(out), in.scalar_type(),
                   [&] { return backend_->_allgather_base(wire_out, wire_in, c10d::AllgatherOptions()); });
  if (copy_back) work.then([out = out, wire_out]() mutable { out.copy_(wire_out.view(out.sizes())); });
  return work;
}

Work Communicator::all_gather(Tensors outs, const at::Tensor& in, Options options) {
  TESSERA_CHECK(static_cast<int64_t>(outs.size()) == size(), UsageError, "all_gather on group '", name_, "' needs ",
                size(), " outputs, one per rank; found ", outs.size());
  TESSERA_CHECK(outs[static_cast<size_t>(rank_)].numel() == in.numel(), UsageError, "all_gather on group '", name_,
                "': the input of this rank is ", in.sizes(), " but its own output is ",
                outs[static_cast<size_t>(rank_)].sizes());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  int64_t longest = 0;
  for (const auto& out : outs) longest = std::max(longest, out.numel());
  // Padded to the longest, because backends need equal parts.   gathered: (size * longest)
  at::Tensor wire_in = in.reshape({-1});
  if (in.numel() < longest) {
    wire_in = at::zeros({longest}, in.options());
    wire_in.narrow(0, 0, in.numel()).copy_(in.reshape({-1}));
  }
  wire_in = wire_in.contiguous();
  at::Tensor gathered = at::empty({size() * longest}, in.options());
  Work work = post(CommKind::AllGather, options, bytes_of(outs), in.scalar_type(),
                   [&] { return backend_->_allgather_base(gathered, wire_in, c10d::AllgatherOptions()); });
  work.then([outs = std::move(outs), gathered, longest]() mutable {
    for (size_t r = 0; r < outs.size(); r++)
      outs[r].copy_(gathered.narrow(0, static_cast<int64_t>(r) * longest, outs[r].numel()).view(outs[r].sizes()));
  });
  return work;
}

Work Communicator::all_gather_coalesced(Tensors outs, Tensors ins, Options options) {
  TESSERA_CHECK(outs.size() == ins.size(), UsageError, "all_gather_coalesced: ", ins.size(), " inputs but ",
                outs.size(), " outputs");
  if (ins.empty()) return Work();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors parts;  // bytes, so that dtypes may differ
  for (size_t i = 0; i < ins.size(); i++) {
    TESSERA_CHECK(outs[i].numel() == ins[i].numel() * size() && outs[i].scalar_type() == ins[i].scalar_type(),
                  UsageError, "all_gather_coalesced: output ", i, " is ", outs[i].sizes(), ", input ", ins[i].sizes(),
                  "; on ", size(), " ranks it must have ", size(), " times the elements and the same dtype");
    parts.push_back(detail::as_bytes(ins[i]));
  }
  at::Tensor wire_in = at::cat(parts);
  at::Tensor gathered = at::empty({size() * wire_in.numel()}, wire_in.options());
  Work work = post(CommKind::AllGatherCoalesced, options, bytes_of(outs), ins[0].scalar_type(),
                   [&] { return backend_->_allgather_base(gathered, wire_in, c10d::AllgatherOptions()); });
  work.then([outs = std::move(outs), gathered, n = size()]() mutable {
    int64_t offset = 0;
    for (auto& out : outs) {
      const int64_t part = bytes_of(out) / n;
      out.copy_(gathered.view({n, -1})
                    .narrow(1, offset, part)
                    .contiguous()
                    .view({-1})
                    .view(out.scalar_type())
                    .view(out.sizes()));
      offset += part;
    }
  });
  return work;
}

Work Communicator::reduce_scatter_tensor(at::Tensor& out, const at::Tensor& in, ReduceOp op, Options options) {
  TESSERA_CHECK(in.numel() == out.numel() * size() && out.scalar_type() == in.scalar_type(), UsageError,
                "reduce_scatter_tensor on group '", name_, "' of ", size(), " ranks: the input must have ", size(),
                " times the output's elements and its dtype; found input ", in.sizes(), " ", in.scalar_type(),
                ", output ", out.sizes(), " ", out.scalar_type());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor wire_in = averaged(in, op, size());
  if (!wire_in.is_contiguous()) wire_in = wire_in.contiguous();
  at::Tensor wire_out = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  c10d::ReduceScatterOptions c10d_options;
  c10d_options.reduceOp = wire_op(op, in.scalar_type(), size());
  const bool copy_back = !wire_out.is_same(out);
  if (!splits_along_rows(wire_in, wire_out, size())) {
    wire_in = wire_in.view({-1});
    wire_out = wire_out.view({-1});
  }
  Work work = post(CommKind::ReduceScatterTensor, options, bytes_of(in), in.scalar_type(),
                   [&] { return backend_->_reduce_scatter_base(wire_out, wire_in, c10d_options); });
  if (copy_back) work.then([out = out, wire_out]() mutable { out.copy_(wire_out.view(out.sizes())); });
  return work;
}

Work Communicator::reduce_scatter(at::Tensor& out, Tensors ins, ReduceOp op, Options options) {
  TESSERA_CHECK(static_cast<int64_t>(ins.size()) == size(), UsageError, "reduce_scatter on group '", name_, "' needs ",
                size(), " inputs, one per rank; found ", ins.size());
  TESSERA_CHECK(ins[static_cast<size_t>(rank_)].numel() == out.numel(), UsageError, "reduce_scatter on group '", name_,
                "': the output of this rank is ", out.sizes(), " but its input for itself is ",
                ins[static_cast<size_t>(rank_)].sizes());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_same_dtype("reduce_scatter", ins);
  int64_t longest = 0;
  for (const auto& in : ins) longest = std::max(longest, in.numel());
  at::Tensor wire_in = at::zeros({size(), longest}, out.options());
  for (size_t r = 0; r < ins.size(); r++)
    wire_in.select(0, static_cast<int64_t>(r)).narrow(0, 0, ins[r].numel()).copy_(ins[r].reshape({-1}));
  wire_in = averaged(wire_in, op, size()).view({-1});
  at::Tensor wire_out = at::empty({longest}, out.options());
  c10d::ReduceScatterOptions c10d_options;
  c10d_options.reduceOp = wire_op(op, out.scalar_type(), size());
  Work work = post(CommKind::ReduceScatter, options, bytes_of(ins), out.scalar_type(),
                   [&] { return backend_->_reduce_scatter_base(wire_out, wire_in, c10d_options); });
  work.then([out = out, wire_out]() mutable { out.copy_(wire_out.narrow(0, 0, out.numel()).view(out.sizes())); });
  return work;
}

Work Communicator::reduce_scatter_coalesced(Tensors outs, Tensors ins, ReduceOp op, Options options) {
  TESSERA_CHECK(outs.size() == ins.size(), UsageError, "reduce_scatter_coalesced: ", ins.size(), " inputs but ",
                outs.size(), " outputs");
  if (ins.empty()) return Work();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_same_dtype("reduce_scatter_coalesced", ins);
  Tensors parts;  // (size, n_i) each
  for (size_t i = 0; i < ins.size(); i++) {
    TESSERA_CHECK(ins[i].numel() == outs[i].numel() * size(), UsageError, "reduce_scatter_coalesced: input ", i, " is ",
                  ins[i].sizes(), ", output ", outs[i].sizes(), "; on ", size(), " ranks the input must have ", size(),
                  " times the elements");
    parts.push_back(ins[i].reshape({size(), -1}));
  }
  at::Tensor wire_in = averaged(at::cat(parts, 1), op, size()).view({-1});
  at::Tensor wire_out = at::empty({wire_in.numel() / size()}, wire_in.options());
  c10d::ReduceScatterOptions c10d_options;
  c10d_options.reduceOp = wire_op(op, wire_in.scalar_type(), size());
  Work work = post(CommKind::ReduceScatterCoalesced, options, bytes_of(wire_in), wire_in.scalar_type(),
                   [&] { return backend_->_reduce_scatter_base(wire_out, wire_in, c10d_options); });
  work.then([outs = std::move(outs), wire_out] { unflatten_into(outs, wire_out); });
  return work;
}

Work Communicator::broadcast(at::Tensor& x, int64_t source, Options options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors wire{x.is_contiguous() ? x : x.contiguous()};
  c10d::BroadcastOptions c10d_options;
  c10d_options.rootRank = source;
  Work work = post(CommKind::Broadcast, options, bytes_of(x), x.scalar_type(),
                   [&] { return backend_->broadcast(wire, c10d_options); });
  if (!wire[0].is_same(x)) work.then([x = x, wire = wire[0]]() mutable { x.copy_(wire); });
  return work;
}

// Scatter and gather are posted as an all-to-all in which only one rank sends, or receives. So parts may differ in
// size, and the other ranks need not know the sizes.
Work Communicator::scatter(at::Tensor& out, Tensors ins, int64_t source, Options options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const size_t n = static_cast<size_t>(size());
  std::vector<int64_t> out_splits(n, 0), in_splits(n, 0);
  out_splits[static_cast<size_t>(source)] = out.numel();
  at::Tensor wire_in = at::empty({0}, out.options());
  if (rank_ == source) {
    TESSERA_CHECK(ins.size() == n, UsageError, "scatter on group '", name_, "': the source must pass ", n,
                  " tensors, one per rank; found ", ins.size());
    check_same_dtype("scatter", ins);
    for (size_t r = 0; r < n; r++) in_splits[r] = ins[r].numel();
    TESSERA_CHECK(in_splits[static_cast<size_t>(rank_)] == out.numel(), UsageError, "scatter on group '", name_,
                  "': the source's own part is ", ins[static_cast<size_t>(rank_)].sizes(), " but its output is ",
                  out.sizes());
    wire_in = flatten(ins);
  }
  at::Tensor wire_out = out.is_contiguous() ? out.view({-1}) : at::empty({out.numel()}, out.options());
  Work work = post(CommKind::Scatter, options, std::max(bytes_of(wire_in), bytes_of(out)), out.scalar_type(), [&] {
    return backend_->alltoall_base(wire_out, wire_in, out_splits, in_splits, c10d::AllToAllOptions());
  });
  if (!out.is_contiguous()) work.then([out = out, wire_out]() mutable { out.copy_(wire_out.view(out.sizes())); });
  return work;
}

Work Communicator::gather(Tensors outs, const at::Tensor& in, int64_t target, Options options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const size_t n = static_cast<size_t>(size());
  std::vector<int64_t> out_splits(n, 0), in_splits(n, 0);
  in_splits[static_cast<size_t>(target)] = in.numel();
  int64_t total = 0;
  if (rank_ == target) {
    TESSERA_CHECK(outs.size() == n, UsageError, "gather on group '", name_, "': the target must pass ", n,
                  " outputs, one per rank; found ", outs.size());
    for (size_t r = 0; r < n; r++) total += out_splits[r] = outs[r].numel();
  }
  at::Tensor wire_in = in.contiguous().view({-1});
  at::Tensor wire_out = at::empty({total}, in.options());
  Work work = post(CommKind::Gather, options, std::max(bytes_of(wire_out), bytes_of(in)), in.scalar_type(), [&] {
    return backend_->alltoall_base(wire_out, wire_in, out_splits, in_splits, c10d::AllToAllOptions());
  });
  if (rank_ == target) work.then([outs = std::move(outs), wire_out] { unflatten_into(outs, wire_out); });
  return work;
}

Work Communicator::reduce(at::Tensor& x, int64_t target, ReduceOp op, Options options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  // Sends a copy: some backends leave partial sums in the tensors of ranks that are not the target.
  Tensors wire{averaged(x, op, size()).clone(at::MemoryFormat::Contiguous)};
  c10d::ReduceOptions c10d_options;
  c10d_options.reduceOp = wire_op(op, x.scalar_type(), size());
  c10d_options.rootRank = target;
  Work work = post(CommKind::Reduce, options, bytes_of(x), x.scalar_type(),
                   [&] { return backend_->reduce(wire, c10d_options); });
  if (rank_ == target) work.then([x = x, wire = wire[0]]() mutable { x.copy_(wire); });
  return work;
}

Work Communicator::all_to_all_single(at::Tensor& out, const at::Tensor& in, at::IntArrayRef out_splits,
                                     at::IntArrayRef in_splits, Options options) {
  const auto check_splits = [&](const char* side, const at::Tensor& x, at::IntArrayRef splits) {
    const int64_t rows = x.dim() ? x.size(0) : 0;
    if (splits.empty()) {
      TESSERA_CHECK(rows % size() == 0, UsageError, "all_to_all_single on group '", name_, "': ", side, " has ", rows,
                    " rows, which do not divide by ", size(), " ranks; pass the splits");
      return;
    }
    int64_t sum = 0;
    for (int64_t s : splits) sum += s;
    TESSERA_CHECK(static_cast<int64_t>(splits.size()) == size() && sum == rows, UsageError,
                  "all_to_all_single on group '", name_, "': ", side, " splits ", splits, " must be ", size(),
                  " numbers whose sum is its ", rows, " rows");
  };
  check_splits("output", out, out_splits);
  check_splits("input", in, in_splits);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor wire_in = in.is_contiguous() ? in : in.contiguous();
  at::Tensor wire_out = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  auto out_list = out_splits.vec(), in_list = in_splits.vec();
  Work work = post(CommKind::AllToAllSingle, options, std::max(bytes_of(in), bytes_of(out)), in.scalar_type(), [&] {
    return backend_->alltoall_base(wire_out, wire_in, out_list, in_list, c10d::AllToAllOptions());
  });
  if (!wire_out.is_same(out)) work.then([out = out, wire_out]() mutable { out.copy_(wire_out); });
  return work;
}

Work Communicator::all_to_all(Tensors outs, Tensors ins, Options options) {
  TESSERA_CHECK(static_cast<int64_t>(outs.size()) == size() && outs.size() == ins.size(), UsageError,
                "all_to_all on group '", name_, "' needs ", size(), " inputs and outputs; found ", ins.size(), " and ",
                outs.size());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_same_dtype("all_to_all", ins);
  std::vector<int64_t> out_splits, in_splits;
  int64_t total = 0;
  for (const auto& in : ins) in_splits.push_back(in.numel());
  for (const auto& out : outs) total += out_splits.emplace_back(out.numel());
  at::Tensor wire_in = flatten(ins);
  at::Tensor wire_out = at::empty({total}, wire_in.options());
  Work work = post(CommKind::AllToAll, options, std::max(bytes_of(ins), bytes_of(outs)), wire_in.scalar_type(), [&] {
    return backend_->alltoall_base(wire_out, wire_in, out_splits, in_splits, c10d::AllToAllOptions());
  });
  work.then([outs = std::move(outs), wire_out] { unflatten_into(outs, wire_out); });
  return work;
}

Work Communicator::send(const at::Tensor& x, int64_t to, int tag, Options options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors wire{x.contiguous()};
  return post(CommKind::Send, options, bytes_of(x), x.scalar_type(),
              [&] { return backend_->send(wire, static_cast<int>(to), tag); });
}

Work Communicator::recv(at::Tensor& x, int64_t from, int tag, Options options) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensors wire{x.is_contiguous() ? x : at::empty(x.sizes(), x.options())};
  Work work = post(CommKind::Recv, options, bytes_of(x), x.scalar_type(),
                   [&] { return backend_->recv(wire, static_cast<int>(from), tag); });
  if (!wire[0].is_same(x)) work.then([x = x, wire = wire[0]]() mutable { x.copy_(wire); });
  return work;
}

Work Communicator::barrier(Options options) {
  return post(CommKind::Barrier, options, 0, c10::ScalarType::Undefined,
              [&] { return backend_->barrier(c10d::BarrierOptions()); });
}

}  // namespace tessera::comm
