#include "tessera/comm/detail/segment_ops.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/detail/inplace_kernels.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <set>
#include <string>

namespace tessera::comm {
namespace {

// A copy of the label that is never freed, because the collective may outlive the compiled program.
const char* interned_label(std::string_view label) {
  static std::mutex mutex;
  static auto* labels = new std::set<std::string, std::less<>>;
  const std::lock_guard lock(mutex);
  auto found = labels->find(label);
  if (found == labels->end()) found = labels->emplace(label).first;
  return found->c_str();
}

std::string current_label() { return CollectiveLabel::current() ? CollectiveLabel::current()->name() : ""; }

void post_all_gather(const std::vector<at::Tensor>& outs, const at::Tensor& part, const Segments& segments,
                     const Group& group, PostOptions options = {}) {
  const Work work = all_gather_into_segments(group, outs, segments, part, options);
  for (const auto& out : outs) group->add_pending(out, work);
}

void post_reduce_scatter(const at::Tensor& out, const std::vector<at::Tensor>& ins, const Segments& segments,
                         ReduceOp op, const Group& group, PostOptions options = {}) {
  group->add_pending(out, reduce_scatter_segments(group, out, ins, segments, op, options));
}

}  // namespace

std::vector<int64_t> segments_to_ints(const Segments& segments) {
  std::vector<int64_t> ints;
  for (const auto& of_rank : segments) {
    ints.push_back(static_cast<int64_t>(of_rank.size()));
    for (const auto& segment : of_rank) ints.insert(ints.end(), {segment.tensor, segment.begin, segment.size});
  }
  return ints;
}

Segments segments_from_ints(at::IntArrayRef ints) {
  Segments segments;
  for (size_t at = 0; at < ints.size();) {
    const auto count = ints[at++];
    TESSERA_CHECK(count >= 0 && at + 3 * static_cast<size_t>(count) <= ints.size(), UsageError,
                  "malformed segments: ", count, " segments at position ", at - 1, " of ", ints.size(),
                  "; each rank has its number of segments, then tensor, begin and size of each");
    auto& of_rank = segments.emplace_back();
    of_rank.reserve(static_cast<size_t>(count));
    for (int64_t r = 0; r < count; r++, at += 3)
      of_rank.push_back({static_cast<int32_t>(ints[at]), ints[at + 1], ints[at + 2]});
  }
  return segments;
}

void detail::all_gather_into_segments_inplace(at::TensorList outs, const at::Tensor& part, at::IntArrayRef segments,
                                              std::string_view label, const Group& group) {
  post_all_gather(outs.vec(), part, segments_from_ints(segments), group, {.tensor_name = interned_label(label)});
}

at::Tensor detail::reduce_scatter_segments_into(const at::Tensor& out, at::TensorList ins, at::IntArrayRef segments,
                                                std::string_view op, std::string_view label, const Group& group) {
  post_reduce_scatter(out, ins.vec(), segments_from_ints(segments), parse_reduce_op(op), group,
                      {.tensor_name = interned_label(label)});
  return out;
}

void all_gather_into_segments_(const std::vector<at::Tensor>& outs, const at::Tensor& part, const Segments& segments,
                               const Group& group) {
  if (!compiling()) return post_all_gather(outs, part, segments, group);
  static auto handle =
      detail::find_op<decltype(detail::all_gather_into_segments_inplace)>("tessera::all_gather_into_segments_");
  handle.call(outs, part, segments_to_ints(segments), current_label(), group);
}

void reduce_scatter_segments_into_(const at::Tensor& out, const std::vector<at::Tensor>& ins, const Segments& segments,
                                   ReduceOp reduce_op, const Group& group) {
  if (!compiling()) return post_reduce_scatter(out, ins, segments, reduce_op, group);
  static auto handle =
      detail::find_op<decltype(detail::reduce_scatter_segments_into)>("tessera::reduce_scatter_segments_into_");
  handle.call(out, ins, segments_to_ints(segments), to_string(reduce_op), current_label(), group);
}

}  // namespace tessera::comm
