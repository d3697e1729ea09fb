#include "tessera/comm/detail/runs_ops.h"

#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/inplace_kernels.h"
#include "tessera/comm/detail/collective_label.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <set>
#include <string>

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

// Labels outlive the collectives they name; a program may not.
const char* kept(std::string_view label) {
  static std::mutex mutex;
  static auto* labels = new std::set<std::string, std::less<>>;
  const std::lock_guard lock(mutex);
  auto found = labels->find(label);
  if (found == labels->end()) found = labels->emplace(label).first;
  return found->c_str();
}

// What the collectives of this thread are about.
std::string current_label() { return Label::current() ? Label::current()->name() : ""; }

template <class Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

void gather(const Tensors& outs, const at::Tensor& part, const Runs& runs, const Group& group,
            PostOptions options = {}) {
  const Work work = all_gather_into_runs(group, outs, runs, part, options);
  for (const auto& out : outs) group->add_pending(out, work);
}

void reduce(const at::Tensor& out, const Tensors& ins, const Runs& runs, ReduceOp op, const Group& group,
            PostOptions options = {}) {
  group->add_pending(out, reduce_scatter_runs(group, out, ins, runs, op, options));
}

}  // namespace

std::vector<int64_t> numbers_of(const Runs& runs) {
  std::vector<int64_t> numbers;
  for (const auto& of_rank : runs) {
    numbers.push_back(static_cast<int64_t>(of_rank.size()));
    for (const auto& run : of_rank) numbers.insert(numbers.end(), {run.tensor, run.begin, run.size});
  }
  return numbers;
}

Runs runs_from(at::IntArrayRef numbers) {
  Runs runs;
  for (size_t at = 0; at < numbers.size();) {
    const auto count = numbers[at++];
    TESSERA_CHECK(count >= 0 && at + 3 * static_cast<size_t>(count) <= numbers.size(), UsageError,
                  "runs of collectives: ", count, " runs at number ", at - 1, " of ", numbers.size(),
                  "; a rank has its number of runs, and for each its tensor, begin and size");
    auto& of_rank = runs.emplace_back();
    of_rank.reserve(static_cast<size_t>(count));
    for (int64_t r = 0; r < count; r++, at += 3)
      of_rank.push_back({static_cast<int32_t>(numbers[at]), numbers[at + 1], numbers[at + 2]});
  }
  return runs;
}

void detail::all_gather_into_runs_inplace(at::TensorList outs, const at::Tensor& part, at::IntArrayRef runs,
                                          std::string_view label, const Group& group) {
  gather(outs.vec(), part, runs_from(runs), group, {.tensor_name = kept(label)});
}

at::Tensor detail::reduce_scatter_runs_into(const at::Tensor& out, at::TensorList ins, at::IntArrayRef runs,
                                            std::string_view op, std::string_view label, const Group& group) {
  reduce(out, ins.vec(), runs_from(runs), parse_reduce_op(op), group, {.tensor_name = kept(label)});
  return out;
}

void all_gather_into_runs_(const Tensors& outs, const at::Tensor& part, const Runs& runs, const Group& group) {
  if (!compiling()) return gather(outs, part, runs, group);
  static auto handle = op<decltype(detail::all_gather_into_runs_inplace)>("tessera::all_gather_into_runs_");
  handle.call(outs, part, numbers_of(runs), current_label(), group);
}

void reduce_scatter_runs_into_(const at::Tensor& out, const Tensors& ins, const Runs& runs, ReduceOp reduce_op,
                               const Group& group) {
  if (!compiling()) return reduce(out, ins, runs, reduce_op, group);
  static auto handle = op<decltype(detail::reduce_scatter_runs_into)>("tessera::reduce_scatter_runs_into_");
  handle.call(out, ins, numbers_of(runs), to_string(reduce_op), current_label(), group);
}

}  // namespace tessera::comm
