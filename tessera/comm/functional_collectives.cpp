#include "tessera/comm/functional_collectives.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/inplace_kernels.h"
#include "tessera/comm/detail/records.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

namespace tessera::funcol {
namespace {

namespace detail = comm::detail;
using comm::Communicator;
using comm::Group;
using comm::Work;

using Sizes = at::IntArrayRef;
using Tensors = std::vector<at::Tensor>;
constexpr Communicator::Options kFunctional{.family = comm::Family::Functional};

int64_t sum(Sizes sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }
int64_t longest(Sizes sizes) { return *std::max_element(sizes.begin(), sizes.end()); }
bool all_equal(Sizes sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [&](int64_t s) { return s == sizes[0]; });
}
int64_t product(Sizes sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }

using Shape = c10::SmallVector<int64_t, 6>;
Shape with_extent(Sizes shape, int64_t dim, int64_t extent) {
  Shape s(shape.begin(), shape.end());
  s[static_cast<size_t>(dim)] = extent;
  return s;
}
// True if the parts along `dim` are consecutive in memory: all dims before `dim` have size 1, or there is one part.
bool parts_are_consecutive(Sizes shape, int64_t dim, Sizes parts) {
  return parts.size() == 1 || product(shape.slice(0, static_cast<size_t>(dim))) == 1;
}

// The size of this rank; -1 if `sizes` is too short, which check_sizes reports.
int64_t own_part(Sizes sizes, const Communicator& group) {
  const auto rank = static_cast<size_t>(group.rank());
  return rank < sizes.size() ? sizes[rank] : -1;
}

void check_sizes(const char* op, const at::Tensor& x, int64_t dim, Sizes sizes, int64_t want,
                 const Communicator& group) {
  TESSERA_CHECK(dim >= 0 && dim < x.dim(), UsageError, op, ": dim ", dim, " of a tensor of shape ", x.sizes());
  TESSERA_CHECK(static_cast<int64_t>(sizes.size()) == group.size(), UsageError, op, " on group '", group.name(),
                "' needs ", group.size(), " sizes, one per rank; found ", sizes);
  TESSERA_CHECK(x.size(dim) == want, UsageError, op, " on group '", group.name(), "': dim ", dim, " of shape ",
                x.sizes(), " must be ", want, " on rank ", group.rank(), ", by sizes ", sizes);
}

// Each collective has an out= variant that writes into a contiguous `out`. Compiled steps use it with planned memory.
at::Tensor& all_reduce_out(const at::Tensor& x, std::string_view op, const Group& group, at::Tensor& out) {
  out.copy_(x);
  group->add_pending(out, group->all_reduce(out, parse_reduce_op(op), kFunctional));
  return out;
}
at::Tensor all_reduce_kernel(const at::Tensor& x, std::string_view op, const Group& group) {
  at::Tensor out = at::empty(x.sizes(), x.options());
  return all_reduce_out(x, op, group, out);
}

Tensors all_reduce_coalesced_kernel(at::TensorList xs, std::string_view op, const Group& group) {
  Tensors outs;
  outs.reserve(xs.size());
  for (const auto& x : xs) outs.push_back(x.clone(at::MemoryFormat::Contiguous));
  Work work = group->all_reduce_coalesced(outs, parse_reduce_op(op), kFunctional);
  for (const auto& out : outs) group->add_pending(out, work);
  return outs;
}

at::Tensor& broadcast_out(const at::Tensor& x, int64_t source, const Group& group, at::Tensor& out) {
  if (group->rank() == source) out.copy_(x);
  group->add_pending(out, group->broadcast(out, source, kFunctional));
  return out;
}
at::Tensor broadcast_kernel(const at::Tensor& x, int64_t source, const Group& group) {
  at::Tensor out = at::empty(x.sizes(), x.options());
  return broadcast_out(x, source, group, out);
}

// Collectives on parts of different sizes use `rows` (size, padded): row r is part r of a tensor along `dim`, flat,
// padded to the longest part.
int64_t padded_numel(const at::Tensor& x, int64_t dim, Sizes sizes) {
  return product(with_extent(x.sizes(), dim, longest(sizes)));
}
// Calls f(part r of x along dim, row r without padding) for every rank r.
template <class F>
void for_each_row(const at::Tensor& x, int64_t dim, Sizes sizes, const at::Tensor& rows, F f) {
  int64_t begin = 0;
  for (size_t r = 0; r < sizes.size(); r++) {
    const at::Tensor part = x.narrow(dim, begin, sizes[r]);
    f(part, rows.select(0, static_cast<int64_t>(r)).narrow(0, 0, part.numel()).view(part.sizes()));
    begin += sizes[r];
  }
}
void unpack_rows(const at::Tensor& rows, const at::Tensor& to, int64_t dim, Sizes sizes) {
  for_each_row(to, dim, sizes, rows, [](const at::Tensor& part, const at::Tensor& row) { part.copy_(row); });
}
at::Tensor pack_rows(const at::Tensor& x, int64_t dim, Sizes sizes) {
  const std::vector<int64_t> shape{static_cast<int64_t>(sizes.size()), padded_numel(x, dim, sizes)};
  const at::Tensor rows = all_equal(sizes) ? at::empty(shape, x.options()) : at::zeros(shape, x.options());
  for_each_row(x, dim, sizes, rows, [](const at::Tensor& part, const at::Tensor& row) { row.copy_(part); });
  return rows;
}
// x with zeros appended to `numel` elements, flat; x itself if it has as many.
at::Tensor pad_to(const at::Tensor& x, int64_t numel) {
  if (x.numel() == numel) return x;
  at::Tensor padded = at::zeros({numel}, x.options());
  padded.narrow(0, 0, x.numel()).view(x.sizes()).copy_(x);
  return padded;
}

// Every rank sends its x, padded to the longest. wait() copies the rows into `out`.
at::Tensor& all_gather_out(const at::Tensor& x, int64_t dim, Sizes sizes, const Group& group, at::Tensor& out) {
  if (all_equal(sizes) && parts_are_consecutive(x.sizes(), dim, sizes)) {
    group->add_pending(out, group->all_gather_into_tensor(out, x, kFunctional));
    return out;
  }
  const int64_t padded = padded_numel(x, dim, sizes);
  at::Tensor rows = at::empty({group->size(), padded}, x.options());
  Work work = group->all_gather_into_tensor(rows, pad_to(x, padded), kFunctional);
  work.then([out, rows, dim, sizes = sizes.vec()] { unpack_rows(rows, out, dim, sizes); });
  group->add_pending(out, std::move(work));
  return out;
}
at::Tensor all_gather_kernel(const at::Tensor& x, int64_t dim, Sizes sizes, const Group& group) {
  check_sizes("all_gather", x, dim, sizes, own_part(sizes, *group), *group);
  at::Tensor out = at::empty(with_extent(x.sizes(), dim, sum(sizes)), x.options());
  return all_gather_out(x, dim, sizes, group, out);
}

at::Tensor& reduce_scatter_out(const at::Tensor& x, int64_t dim, Sizes sizes, std::string_view op, const Group& group,
                               at::Tensor& out) {
  const ReduceOp reduce_op = parse_reduce_op(op);
  if (all_equal(sizes) && parts_are_consecutive(x.sizes(), dim, sizes)) {
    group->add_pending(out, group->reduce_scatter_tensor(out, x, reduce_op, kFunctional));
    return out;
  }
  const at::Tensor rows = pack_rows(x, dim, sizes);
  // A rank with a shorter part receives into a buffer with room for the padding.
  at::Tensor received = out.numel() == rows.size(1) ? out : at::empty({rows.size(1)}, x.options());
  Work work = group->reduce_scatter_tensor(received, rows, reduce_op, kFunctional);
  if (!received.is_same(out)) work.then([out, received] { out.view({-1}).copy_(received.narrow(0, 0, out.numel())); });
  group->add_pending(out, std::move(work));
  return out;
}
at::Tensor reduce_scatter_kernel(const at::Tensor& x, int64_t dim, Sizes sizes, std::string_view op,
                                 const Group& group) {
  check_sizes("reduce_scatter", x, dim, sizes, sum(sizes), *group);
  at::Tensor out = at::empty(with_extent(x.sizes(), dim, sizes[static_cast<size_t>(group->rank())]), x.options());
  return reduce_scatter_out(x, dim, sizes, op, group, out);
}

void check_coalesced(const char* op, at::TensorList xs, Sizes dims, Sizes sizes, const Group& group) {
  const auto n = static_cast<size_t>(group->size());
  TESSERA_CHECK(dims.size() == xs.size() && sizes.size() == xs.size() * n, UsageError, op, " of ", xs.size(),
                " tensors on ", n, " ranks needs ", xs.size(), " dims and ", xs.size() * n, " sizes; found ",
                dims.size(), " and ", sizes.size());
}
// The sizes of tensor i, on `ranks` ranks.
Sizes sizes_of(Sizes sizes, size_t i, int64_t ranks) {
  const auto n = static_cast<size_t>(ranks);
  return sizes.slice(i * n, n);
}

// Each tensor is padded separately; all are sent in one collective.
Tensors all_gather_coalesced_kernel(at::TensorList xs, Sizes dims, Sizes sizes, const Group& group) {
  check_coalesced("all_gather_coalesced", xs, dims, sizes, group);
  Tensors outs, rows, sends;
  for (size_t i = 0; i < xs.size(); i++) {
    const Sizes own = sizes_of(sizes, i, group->size());
    check_sizes("all_gather_coalesced", xs[i], dims[i], own, own_part(own, *group), *group);
    const int64_t padded = padded_numel(xs[i], dims[i], own);
    sends.push_back(pad_to(xs[i], padded));
    rows.push_back(at::empty({group->size(), padded}, xs[i].options()));
    outs.push_back(at::empty(with_extent(xs[i].sizes(), dims[i], sum(own)), xs[i].options()));
  }
  Work work = group->all_gather_coalesced(rows, sends, kFunctional);
  work.then([outs, rows, dims = dims.vec(), sizes = sizes.vec(), ranks = group->size()] {
    for (size_t i = 0; i < outs.size(); i++) unpack_rows(rows[i], outs[i], dims[i], sizes_of(sizes, i, ranks));
  });
  for (const auto& out : outs) group->add_pending(out, work);
  return outs;
}

Tensors reduce_scatter_coalesced_kernel(at::TensorList xs, Sizes dims, Sizes sizes, std::string_view op,
                                        const Group& group) {
  check_coalesced("reduce_scatter_coalesced", xs, dims, sizes, group);
  Tensors outs, received, rows;
  for (size_t i = 0; i < xs.size(); i++) {
    const Sizes own = sizes_of(sizes, i, group->size());
    check_sizes("reduce_scatter_coalesced", xs[i], dims[i], own, sum(own), *group);
    rows.push_back(pack_rows(xs[i], dims[i], own));
    outs.push_back(at::empty(with_extent(xs[i].sizes(), dims[i], own_part(own, *group)), xs[i].options()));
    const int64_t padded = rows.back().size(1);
    received.push_back(outs.back().numel() == padded ? outs.back() : at::empty({padded}, xs[i].options()));
  }
  Work work = group->reduce_scatter_coalesced(received, rows, parse_reduce_op(op), kFunctional);
  work.then([outs, received] {
    for (size_t i = 0; i < outs.size(); i++)
      if (!received[i].is_same(outs[i])) outs[i].view({-1}).copy_(received[i].narrow(0, 0, outs[i].numel()));
  });
  for (const auto& out : outs) group->add_pending(out, work);
  return outs;
}

// Returns the shape of the output. Throws UsageError if the sizes are inconsistent.
Shape check_all_to_all(const at::Tensor& x, int64_t split_dim, Sizes split_sizes, int64_t cat_dim, Sizes cat_sizes,
                       const Group& group) {
  check_sizes("all_to_all", x, split_dim, split_sizes, sum(split_sizes), *group);
  const int64_t interned_label = own_part(cat_sizes, *group);
  if (split_dim != cat_dim)
    check_sizes("all_to_all", x, cat_dim, cat_sizes, interned_label, *group);
  else  // along one dim, a rank keeps what it sends to itself
    TESSERA_CHECK(interned_label == own_part(split_sizes, *group), UsageError, "all_to_all on group '", group->name(),
                  "' along dim ", split_dim, ": rank ", group->rank(), " sends ", own_part(split_sizes, *group),
                  " to itself, and cannot receive ", interned_label, " from itself");
  const Shape part = with_extent(x.sizes(), split_dim, own_part(split_sizes, *group));
  return with_extent(part, cat_dim, sum(cat_sizes));
}

// The parts are sent flat, with splits in elements, so nothing is padded.
at::Tensor& all_to_all_out(const at::Tensor& x, int64_t split_dim, Sizes split_sizes, int64_t cat_dim, Sizes cat_sizes,
                           const Group& group, at::Tensor& out) {
  const size_t n = static_cast<size_t>(group->size());
  const int64_t own = split_sizes[static_cast<size_t>(group->rank())];
  std::vector<int64_t> in_splits(n), out_splits(n);
  const Shape part = with_extent(x.sizes(), split_dim, own);  // from rank r, except for its size along cat_dim
  for (size_t r = 0; r < n; r++) {
    in_splits[r] = product(with_extent(x.sizes(), split_dim, split_sizes[r]));
    out_splits[r] = product(with_extent(part, cat_dim, cat_sizes[r]));
  }
  at::Tensor send;
  if (parts_are_consecutive(x.sizes(), split_dim, split_sizes)) {
    send = x.contiguous().view({-1});
  } else {
    send = at::empty({x.numel()}, x.options());
    int64_t begin = 0, offset = 0;
    for (size_t r = 0; r < n; r++) {
      at::Tensor from = x.narrow(split_dim, begin, split_sizes[r]);
      send.narrow(0, offset, from.numel()).view(from.sizes()).copy_(from);
      begin += split_sizes[r];
      offset += from.numel();
    }
  }
  if (parts_are_consecutive(out.sizes(), cat_dim, cat_sizes)) {
    at::Tensor flat = out.view({-1});
    group->add_pending(out, group->all_to_all_single(flat, send, out_splits, in_splits, kFunctional));
    return out;
  }
  at::Tensor wire = at::empty({out.numel()}, x.options());
  Work work = group->all_to_all_single(wire, send, out_splits, in_splits, kFunctional);
  work.then([out, wire, cat_dim, cat_sizes = cat_sizes.vec()] {
    int64_t begin = 0, offset = 0;
    for (int64_t extent : cat_sizes) {
      at::Tensor to = out.narrow(cat_dim, begin, extent);
      to.copy_(wire.narrow(0, offset, to.numel()).view(to.sizes()));
      begin += extent;
      offset += to.numel();
    }
  });
  group->add_pending(out, std::move(work));
  return out;
}
at::Tensor all_to_all_kernel(const at::Tensor& x, int64_t split_dim, Sizes split_sizes, int64_t cat_dim,
                             Sizes cat_sizes, const Group& group) {
  at::Tensor out = at::empty(check_all_to_all(x, split_dim, split_sizes, cat_dim, cat_sizes, group), x.options());
  return all_to_all_out(x, split_dim, split_sizes, cat_dim, cat_sizes, group, out);
}

at::Tensor wait_kernel(const at::Tensor& x, const Group& group) {
  if (C10_UNLIKELY(comm::observed())) {
    comm::Record record;
    record.group = group->name();
    record.sequence = group->sequence();
    record.kind = comm::CommKind::Wait;
    record.family = comm::Family::Functional;
    record.dtype = x.scalar_type();
    record.posted = record.started = std::chrono::steady_clock::now();
    comm::notify_post(record);
  }
  auto work = group->take_pending(x);
  try {
    work.wait();
  } catch (...) {  // the result was not filled, so it stays pending
    group->add_pending(x, work);
    throw;
  }
  return x;
}

}  // namespace

TORCH_LIBRARY(tessera, m) {
  m.class_<Communicator>("Group").def("name", [](const Group& self) { return self->name(); });
  // No result aliases an input. wait() makes the memory of its argument valid, so its schema is in-place.
#define TESSERA_GROUP "__torch__.torch.classes.tessera.Group group"
  m.def("all_reduce(Tensor x, str op, " TESSERA_GROUP ") -> Tensor");
  m.def("all_reduce_coalesced(Tensor[] xs, str op, " TESSERA_GROUP ") -> Tensor[]");
  m.def("all_gather(Tensor x, int dim, int[] sizes, " TESSERA_GROUP ") -> Tensor");
  m.def("all_gather_coalesced(Tensor[] xs, int[] dims, int[] sizes, " TESSERA_GROUP ") -> Tensor[]");
  m.def("reduce_scatter(Tensor x, int dim, int[] sizes, str op, " TESSERA_GROUP ") -> Tensor");
  m.def("reduce_scatter_coalesced(Tensor[] xs, int[] dims, int[] sizes, str op, " TESSERA_GROUP ") -> Tensor[]");
  m.def("all_to_all(Tensor x, int split_dim, int[] split_sizes, int cat_dim, int[] cat_sizes, " TESSERA_GROUP
        ") -> Tensor");
  m.def("broadcast(Tensor x, int source, " TESSERA_GROUP ") -> Tensor");
  m.def("wait(Tensor(a!) x, " TESSERA_GROUP ") -> Tensor(a!)");
  // out= variants: `out` has the shape of the result and is contiguous.
  m.def("all_reduce.out(Tensor x, str op, " TESSERA_GROUP ", *, Tensor(a!) out) -> Tensor(a!)");
  m.def("all_gather.out(Tensor x, int dim, int[] sizes, " TESSERA_GROUP ", *, Tensor(a!) out) -> Tensor(a!)");
  m.def("reduce_scatter.out(Tensor x, int dim, int[] sizes, str op, " TESSERA_GROUP
        ", *, Tensor(a!) out) -> Tensor(a!)");
  m.def("all_to_all.out(Tensor x, int split_dim, int[] split_sizes, int cat_dim, int[] cat_sizes, " TESSERA_GROUP
        ", *, Tensor(a!) out) -> Tensor(a!)");
  m.def("broadcast.out(Tensor x, int source, " TESSERA_GROUP ", *, Tensor(a!) out) -> Tensor(a!)");
  // In-place (inplace_ops.cpp).
  m.def("all_reduce_(Tensor(a!) x, str op, " TESSERA_GROUP ") -> Tensor(a!)");
  m.def("all_reduce_coalesced_(Tensor(a!)[] xs, str op, " TESSERA_GROUP ") -> ()");
  m.def("broadcast_(Tensor(a!) x, int source, " TESSERA_GROUP ") -> Tensor(a!)");
  m.def("all_gather_into_(Tensor(a!) out, Tensor x, " TESSERA_GROUP ") -> Tensor(a!)");
  m.def("reduce_scatter_into_(Tensor(a!) out, Tensor x, str op, " TESSERA_GROUP ") -> Tensor(a!)");
  // Between one tensor and segments of several (segment_ops.cpp).
  m.def("all_gather_into_segments_(Tensor(a!)[] outs, Tensor part, int[] segments, str label, " TESSERA_GROUP
        ") -> ()");
  m.def("reduce_scatter_segments_into_(Tensor(a!) out, Tensor[] ins, int[] segments, str op, str label, " TESSERA_GROUP
        ") -> Tensor(a!)");
#undef TESSERA_GROUP
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("all_reduce", all_reduce_kernel);
  m.impl("all_reduce_coalesced", all_reduce_coalesced_kernel);
  m.impl("all_gather", all_gather_kernel);
  m.impl("all_gather_coalesced", all_gather_coalesced_kernel);
  m.impl("reduce_scatter", reduce_scatter_kernel);
  m.impl("reduce_scatter_coalesced", reduce_scatter_coalesced_kernel);
  m.impl("all_to_all", all_to_all_kernel);
  m.impl("broadcast", broadcast_kernel);
  m.impl("wait", wait_kernel);
  m.impl("all_reduce_", detail::all_reduce_inplace);
  m.impl("all_reduce_coalesced_", detail::all_reduce_coalesced_inplace);
  m.impl("broadcast_", detail::broadcast_inplace);
  m.impl("all_gather_into_", detail::all_gather_into);
  m.impl("reduce_scatter_into_", detail::reduce_scatter_into);
  m.impl("all_gather_into_segments_", detail::all_gather_into_segments_inplace);
  m.impl("reduce_scatter_segments_into_", detail::reduce_scatter_segments_into);
}

// Registered per device: a compiled step uses an out= variant only if it has its own kernel for the device.
#define TESSERA_OUT_FORMS(m)                        \
  m.impl("all_reduce.out", all_reduce_out);         \
  m.impl("all_gather.out", all_gather_out);         \
  m.impl("reduce_scatter.out", reduce_scatter_out); \
  m.impl("all_to_all.out", all_to_all_out);         \
  m.impl("broadcast.out", broadcast_out)
TORCH_LIBRARY_IMPL(tessera, CPU, m) { TESSERA_OUT_FORMS(m); }
TORCH_LIBRARY_IMPL(tessera, CUDA, m) { TESSERA_OUT_FORMS(m); }
#undef TESSERA_OUT_FORMS

at::Tensor all_reduce(const at::Tensor& x, ReduceOp reduce_op, const Group& group) {
  static auto handle = detail::find_op<decltype(all_reduce_kernel)>("tessera::all_reduce");
  return handle.call(x, to_string(reduce_op), group);
}
Tensors all_reduce_coalesced(at::TensorList xs, ReduceOp reduce_op, const Group& group) {
  static auto handle = detail::find_op<decltype(all_reduce_coalesced_kernel)>("tessera::all_reduce_coalesced");
  return handle.call(xs, to_string(reduce_op), group);
}
at::Tensor all_gather(const at::Tensor& x, int64_t dim, Sizes sizes, const Group& group) {
  static auto handle = detail::find_op<decltype(all_gather_kernel)>("tessera::all_gather");
  return handle.call(x, dim, sizes, group);
}
Tensors all_gather_coalesced(at::TensorList xs, Sizes dims, Sizes sizes, const Group& group) {
  static auto handle = detail::find_op<decltype(all_gather_coalesced_kernel)>("tessera::all_gather_coalesced");
  return handle.call(xs, dims, sizes, group);
}
at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, Sizes sizes, ReduceOp reduce_op, const Group& group) {
  static auto handle = detail::find_op<decltype(reduce_scatter_kernel)>("tessera::reduce_scatter");
  return handle.call(x, dim, sizes, to_string(reduce_op), group);
}
Tensors reduce_scatter_coalesced(at::TensorList xs, Sizes dims, Sizes sizes, ReduceOp reduce_op, const Group& group) {
  static auto handle = detail::find_op<decltype(reduce_scatter_coalesced_kernel)>("tessera::reduce_scatter_coalesced");
  return handle.call(xs, dims, sizes, to_string(reduce_op), group);
}
at::Tensor all_to_all(const at::Tensor& x, int64_t split_dim, Sizes split_sizes, int64_t cat_dim, Sizes cat_sizes,
                      const Group& group) {
  static auto handle = detail::find_op<decltype(all_to_all_kernel)>("tessera::all_to_all");
  return handle.call(x, split_dim, split_sizes, cat_dim, cat_sizes, group);
}
at::Tensor broadcast(const at::Tensor& x, int64_t source, const Group& group) {
  static auto handle = detail::find_op<decltype(broadcast_kernel)>("tessera::broadcast");
  return handle.call(x, source, group);
}
void wait(const at::Tensor& x, const Group& group) {
  if (group->size() == 1) return;  // its collectives are complete when they return
  static auto handle = detail::find_op<decltype(wait_kernel)>("tessera::wait");
  handle.call(x, group);
}

}  // namespace tessera::funcol
