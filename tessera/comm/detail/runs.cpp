#include "tessera/comm/detail/runs.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/communicator_post.h"
#include "tessera/comm/detail/wire_op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

// Collectives between one tensor and runs of many. A backend that cannot take runs gets one buffer, and they are copied
// into it before, or out of it after.
namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

void check_runs(const char* what, const Tensors& tensors, const Runs& runs, const at::Tensor& small, int64_t ranks) {
  TESSERA_CHECK(static_cast<int64_t>(runs.size()) == ranks, UsageError, what, ": runs for ", runs.size(), " ranks of ",
                ranks);
  for (const auto& t : tensors)
    TESSERA_CHECK(t.is_contiguous() && t.scalar_type() == small.scalar_type(), UsageError, what,
                  ": runs are of contiguous tensors of ", small.scalar_type(), "; found one of ", t.scalar_type(),
                  ", sizes ", t.sizes(), ", strides ", t.strides());
  for (const auto& of_rank : runs) {
    int64_t total = 0;
    for (const auto& run : of_rank) {
      total += run.size;
      if (run.tensor == kPadding) continue;
      const auto which = static_cast<size_t>(run.tensor);
      TESSERA_CHECK(which < tensors.size() && run.begin >= 0 && run.begin + run.size <= tensors[which].numel(),
                    UsageError, what, ": a run of elements ", run.begin, " to ", run.begin + run.size, " of tensor ",
                    run.tensor, ", which is not there");
    }
    TESSERA_CHECK(total == small.numel(), UsageError, what, ": a rank's runs have ", total, " elements, and its part ",
                  small.numel());
  }
}

// Calls f(run's memory, its place in the part of its rank) for all but padding.
template <class F>
void for_each_run(const Tensors& tensors, const std::vector<Run>& runs, const at::Tensor& part, F f) {
  int64_t at = 0;
  for (const auto& run : runs) {
    if (run.tensor != kPadding && run.size > 0)
      f(tensors[static_cast<size_t>(run.tensor)].view({-1}).narrow(0, run.begin, run.size),
        part.narrow(0, at, run.size));
    at += run.size;
  }
}

// The ranks' parts one after the other: what every backend does.
bool is_one_tensor(const Tensors& tensors, const Runs& runs, int64_t part) {
  for (size_t r = 0; r < runs.size(); r++)
    if (!(runs[r] == std::vector<Run>{{0, static_cast<int64_t>(r) * part, part}})) return false;
  return tensors[0].numel() == static_cast<int64_t>(runs.size()) * part;
}

int64_t bytes_of_all(const at::Tensor& part, int64_t ranks) { return static_cast<int64_t>(part.nbytes()) * ranks; }

}  // namespace

Work all_gather_into_runs(const Group& group, const Tensors& outs, const Runs& runs, const at::Tensor& in,
                          PostOptions options) {
  const int64_t ranks = group->size();
  check_runs("all_gather_into_runs", outs, runs, in, ranks);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto part = in.contiguous().view({-1});
  const auto post = [&](const PostCall& call) {
    return post_on(*group, Kind::AllGatherIntoTensor, options, bytes_of_all(in, ranks), in.scalar_type(), call);
  };
  if (auto* backend = dynamic_cast<MovesRuns*>(group->backend().get()); backend && ranks > 1)
    return post([&] { return backend->allgather_runs(outs, runs, part); });
  if (is_one_tensor(outs, runs, in.numel())) {
    at::Tensor out = outs[0];
    return group->all_gather_into_tensor(out, part, options);
  }
  at::Tensor wire_in = part, wire_out = at::empty({ranks * in.numel()}, in.options());
  Work work = post([&] { return group->backend()->_allgather_base(wire_out, wire_in, c10d::AllgatherOptions()); });
  work.then([outs, runs, parts = wire_out.view({ranks, -1})] {
    for (size_t r = 0; r < runs.size(); r++)
      for_each_run(outs, runs[r], parts[static_cast<int64_t>(r)],
                   [](const at::Tensor& run, const at::Tensor& part) { run.copy_(part); });
  });
  return work;
}

Work reduce_scatter_runs(const Group& group, const at::Tensor& out, const Tensors& ins, const Runs& runs, ReduceOp op,
                         PostOptions options) {
  const int64_t ranks = group->size();
  check_runs("reduce_scatter_runs", ins, runs, out, ranks);
  TESSERA_CHECK(out.is_contiguous() && op != ReduceOp::Avg, UsageError, "reduce_scatter_runs: the output of sizes ",
                out.sizes(), " must be contiguous, and avg is not one of its ops; divide the sum");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10d::ReduceScatterOptions c10d_options;
  c10d_options.reduceOp = detail::wire_op(op);
  const auto post = [&](const PostCall& call) {
    return post_on(*group, Kind::ReduceScatterTensor, options, bytes_of_all(out, ranks), out.scalar_type(), call);
  };
  if (auto* backend = dynamic_cast<MovesRuns*>(group->backend().get()); backend && ranks > 1)
    return post([&] { return backend->reduce_scatter_runs(out, ins, runs, c10d_options); });
  at::Tensor wire_in = at::zeros({ranks * out.numel()}, out.options()), wire_out = out.view({-1});
  const auto parts = wire_in.view({ranks, -1});
  for (size_t r = 0; r < runs.size(); r++)
    for_each_run(ins, runs[r], parts[static_cast<int64_t>(r)],
                 [](const at::Tensor& run, const at::Tensor& part) { part.copy_(run); });
  return post([&] { return group->backend()->_reduce_scatter_base(wire_out, wire_in, c10d_options); });
}

}  // namespace tessera::comm
