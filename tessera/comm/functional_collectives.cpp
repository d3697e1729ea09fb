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

// Every rank sends its x, padded to the longest. wait() copies the parts into `out`.
//   wire (size, longest): | x of rank 0 | x of rank 1 ... |   ->   out, split along dim: sizes[0], sizes[1], ...
at::Tensor& all_gather_out(const at::Tensor& x, int64_t dim, Sizes sizes, const Group& group, at::Tensor& out) {
  if (all_equal(sizes) && parts_are_consecutive(x.sizes(), dim, sizes)) {
    group->add_pending(out, group->all_gather_into_tensor(out, x, kFunctional));
    return out;
  }
  const int64_t row = x.size(dim) ? x.numel() / x.size(dim) : product(with_extent(x.sizes(), dim, 1));
  const int64_t padded = row * longest(sizes);
  at::Tensor send = x;
  if (x.numel() < padded) {
    send = at::zeros({padded}, x.options());
    send.narrow(0, 0, x.numel()).view(x.sizes()).copy_(x);
  }
  at::Tensor wire = at::empty({group->size(), padded}, x.options());
  Work work = group->all_gather_into_tensor(wire, send, kFunctional);
  work.then([out, wire, dim, sizes = sizes.vec()] {
    int64_t begin = 0;
    for (size_t r = 0; r < sizes.size(); r++) {
      at::Tensor to = out.narrow(dim, begin, sizes[r]);
      to.copy_(wire.select(0, static_cast<int64_t>(r)).narrow(0, 0, to.numel()).view(to.sizes()));
      begin += sizes[r];
    }
  });
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
  const int64_t padded = product(with_extent(x.sizes(), dim, longest(sizes)));
  at::Tensor wire = all_equal(sizes) ? at::empty({group->size(), padded}, x.options())
                                     : at::zeros({group->size(), padded}, x.options());
  int64_t begin = 0;
  for (size_t r = 0; r < sizes.size(); r++) {
    at::Tensor from = x.narrow(dim, begin, sizes[r]);
    wire.select(0, static_cast<int64_t>(r)).narrow(0, 0, from.numel()).view(from.sizes()).copy_(from);
    begin += sizes[r];
  }
  // A rank with a shorter part receives into a buffer with room for the padding.
  at::Tensor receive = out.numel() == padded ? out : at::empty({padded}, x.options());
  Work work = group->reduce_scatter_tensor(receive, wire, reduce_op, kFunctional);
  if (!receive.is_same(out)) work.then([out, receive] { out.view({-1}).copy_(receive.narrow(0, 0, out.numel())); });
  group->add_pending(out, std::move(work));
  return out;
}
at::Tensor reduce_scatter_kernel(const at::Tensor& x, int64_t dim, Sizes sizes, std::string_view op,
                                 const Group& group) {
  check_sizes("reduce_scatter", x, dim, sizes, sum(sizes), *group);
  at::Tensor out = at::empty(with_extent(x.sizes(), dim, sizes[static_cast<size_t>(group->rank())]), x.options());
  return reduce_scatter_out(x, dim, sizes, op, group, out);
}

// Each tensor is padded separately; all are sent in one collective.
Tensors all_gather_coalesced_kernel(at::TensorList xs, Sizes dims, Sizes sizes, const Group& group) {
  const size_t n = static_cast<size_t>(group->size());
  TESSERA_CHECK(dims.size() == xs.size() && sizes.size() == xs.size() * n, UsageError, "all_gather_coalesced of ",
                xs.size(), " tensors on ", n, " ranks needs as many dims and ", xs.size() * n, " sizes; found ",
                dims.size(), " and ", sizes.size());
  Tensors outs, wires, sends;
  for (size_t i = 0; i < xs.size(); i++) {
    const Sizes own = sizes.slice(i * n, n);
    check_sizes("all_gather_coalesced", xs[i], dims[i], own, own[static_cast<size_t>(group->rank())], *group);
    const int64_t padded = product(with_extent(xs[i].sizes(), dims[i], longest(own)));
    at::Tensor send = xs[i];
    if (send.numel() < padded) {
      send = at::zeros({padded}, xs[i].options());
      send.narrow(0, 0, xs[i].numel()).view(xs[i].sizes()).copy_(xs[i]);
    }
    sends.push_back(send);
    wires.push_back(at::empty({group->size(), padded}, xs[i].options()));
    outs.push_back(at::empty(with_extent(xs[i].sizes(), dims[i], sum(own)), xs[i].options()));
  }
  Work work = group->all_gather_coalesced(wires, sends, kFunctional);
  work.then([outs, wires, dims = dims.vec(), sizes = sizes.vec(), n] {
    for (size_t i = 0; i < outs.size(); i++)
      for (size_t r = 0, begin = 0; r < n; r++) {
        at::Tensor to = outs[i].narrow(dims[i], static_cast<int64_t>(begin), sizes[i * n + r]);
        to.copy_(wires[i].select(0, static_cast<int64_t>(r)).narrow(0, 0, to.numel()).view(to.sizes()));
        begin += static_cast<size_t>(sizes[i * n + r]);
      }
  });
  for (const auto& out : outs) group->add_pending(out, work);
  return outs;
}

Tensors reduce_scatter_coalesced_kernel(at::TensorList xs, Sizes dims, Sizes sizes, std::string_view op,
                                        const Group& group) {
  const size_t n = static_cast<size_t>(group->size());
  TESSERA_CHECK(dims.size() == xs.size() && sizes.size() == xs.size() * n, UsageError, "reduce_scatter_coalesced of ",
                xs.size(), " tensors on ", n, " ranks needs as many dims and ", xs.size() * n, " sizes; found ",
                dims.size(), " and ", sizes.size());
  Tensors outs, receives, wires;
  for (size_t i = 0; i < xs.size(); i++) {
    const Sizes own = sizes.slice(i * n, n);
    check_sizes("reduce_scatter_coalesced", xs[i], dims[i], own, sum(own), *group);
    const int64_t padded = product(with_extent(xs[i].sizes(), dims[i], longest(own)));
    at::Tensor wire = at::zeros({group->size(), padded}, xs[i].options());
    for (size_t r = 0, begin = 0; r < n; r++) {
      at::Tensor from = xs[i].narrow(dims[i], static_cast<int64_t>(begin), own[r]);
      wire.select(0, static_cast<int64_t>(r)).narrow(0, 0, from.numel()).view(from.sizes()).copy_(from);
      begin += static_cast<size_t>(own[r]);
    }
    wires.push_back(wire);
    outs.push_back(
        at::empty(with_extent(xs[i].sizes(), dims[i], own[static_cast<size_t>(group->rank())]), xs[i].options()));
    receives.push_back(outs.back().numel() == padded ? outs.back() : at::empty({padded}, xs[i].options()));
  }
  Work work = group->reduce_scatter_coalesced(receives, wires, parse_reduce_op(op), kFunctional);
  work.then([outs, receives] {
    for (size_t i = 0; i < outs.size(); i++)
      if (!receives[i].is_same(outs[i])) outs[i].view({-1}).copy_(receives[i].narrow(0, 0, outs[i].numel()));
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
  static auto handle = detail::find_op<decltype(wait_kernel)>("tessera::wait");
  handle.call(x, group);
}

}  // namespace tessera::funcol
