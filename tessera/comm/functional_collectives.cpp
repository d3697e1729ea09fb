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
// Nothing lies before `dim` in memory, or there is but one part: cutting or joining along dim cuts or joins memory.
bool joins_memory(Sizes shape, int64_t dim, Sizes parts) {
  return parts.size() == 1 || product(shape.slice(0, static_cast<size_t>(dim))) == 1;
}

// This rank's of the sizes; -1 where there are too few of them, which check_sizes reports.
int64_t own_part(Sizes sizes, const Communicator& group) {
  const auto rank = static_cast<size_t>(group.rank());
  return rank < sizes.size() ? sizes[rank] : -1;
}

void check_sizes(const char* op, const at::Tensor& x, int64_t dim, Sizes sizes, int64_t want,
                 const Communicator& group) {
  TESSERA_CHECK(dim >= 0 && dim < x.dim(), UsageError, op, ": dim ", dim, " of a tensor of shape ", x.sizes());
  TESSERA_CHECK(static_cast<int64_t>(sizes.size()) == group.size(), UsageError, op, " on group '", group.name(),
                "' needs ", group.size(), " sizes, one a rank; found ", sizes);
  TESSERA_CHECK(x.size(dim) == want, UsageError, op, " on group '", group.name(), "': dim ", dim, " of shape ",
                x.sizes(), " must be ", want, " on rank ", group.rank(), ", by sizes ", sizes);
}

// Each is first written for an `out` that is given, without gaps; the op makes one. Compiled steps have theirs.
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

// Every rank sends its x as it lies in memory, padded to the longest; the pieces are put in place when they have come.
//   wire (size, longest): | rank 0's x | rank 1's x .. |   ->   out, cut along dim: sizes[0], sizes[1], ...
at::Tensor& all_gather_out(const at::Tensor& x, int64_t dim, Sizes sizes, const Group& group, at::Tensor& out) {
  if (all_equal(sizes) && joins_memory(x.sizes(), dim, sizes)) {
    group->add_pending(out, group->all_gather_into_tensor(out, x, kFunctional));
    return out;
  }
  const int64_t row = x.size(dim) ? x.numel() / x.size(dim) : product(with_extent(x.sizes(), dim, 1));
  const int64_t padded = row * longest(sizes);
  at::Tensor give = x;
  if (x.numel() < padded) {
    give = at::zeros({padded}, x.options());
    give.narrow(0, 0, x.numel()).view(x.sizes()).copy_(x);
  }
  at::Tensor wire = at::empty({group->size(), padded}, x.options());
  Work work = group->all_gather_into_tensor(wire, give, kFunctional);
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
  if (all_equal(sizes) && joins_memory(x.sizes(), dim, sizes)) {
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
  // A rank with less than the longest gets its part into a buffer with room for the padding.
  at::Tensor take = out.numel() == padded ? out : at::empty({padded}, x.options());
  Work work = group->reduce_scatter_tensor(take, wire, reduce_op, kFunctional);
  if (!take.is_same(out)) work.then([out, take] { out.view({-1}).copy_(take.narrow(0, 0, out.numel())); });
  group->add_pending(out, std::move(work));
  return out;
}
at::Tensor reduce_scatter_kernel(const at::Tensor& x, int64_t dim, Sizes sizes, std::string_view op,
                                 const Group& group) {
  check_sizes("reduce_scatter", x, dim, sizes, sum(sizes), *group);
  at::Tensor out = at::empty(with_extent(x.sizes(), dim, sizes[static_cast<size_t>(group->rank())]), x.options());
  return reduce_scatter_out(x, dim, sizes, op, group, out);
}

// Each tensor of the list is padded on its own; all of them travel as one message.
Tensors all_gather_coalesced_kernel(at::TensorList xs, Sizes dims, Sizes sizes, const Group& group) {
  const size_t n = static_cast<size_t>(group->size());
  TESSERA_CHECK(dims.size() == xs.size() && sizes.size() == xs.size() * n, UsageError, "all_gather_coalesced of ",
                xs.size(), " tensors on ", n, " ranks needs as many dims and ", xs.size() * n, " sizes; found ",
                dims.size(), " and ", sizes.size());
  Tensors outs, wires, gives;
  for (size_t i = 0; i < xs.size(); i++) {
    const Sizes own = sizes.slice(i * n, n);
    check_sizes("all_gather_coalesced", xs[i], dims[i], own, own[static_cast<size_t>(group->rank())], *group);
    const int64_t padded = product(with_extent(xs[i].sizes(), dims[i], longest(own)));
    at::Tensor give = xs[i];
    if (give.numel() < padded) {
      give = at::zeros({padded}, xs[i].options());
      give.narrow(0, 0, xs[i].numel()).view(xs[i].sizes()).copy_(xs[i]);
    }
    gives.push_back(give);
    wires.push_back(at::empty({group->size(), padded}, xs[i].options()));
    outs.push_back(at::empty(with_extent(xs[i].sizes(), dims[i], sum(own)), xs[i].options()));
  }
  Work work = group->all_gather_coalesced(wires, gives, kFunctional);
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
  Tensors outs, takes, wires;
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
    takes.push_back(outs.back().numel() == padded ? outs.back() : at::empty({padded}, xs[i].options()));
  }
  Work work = group->reduce_scatter_coalesced(takes, wires, parse_reduce_op(op), kFunctional);
  work.then([outs, takes] {
    for (size_t i = 0; i < outs.size(); i++)
      if (!takes[i].is_same(outs[i])) outs[i].view({-1}).copy_(takes[i].narrow(0, 0, outs[i].numel()));
  });
  for (const auto& out : outs) group->add_pending(out, work);
  return outs;
}

// Pieces travel as they lie in memory, one after the other; sizes in elements, so nothing is padded.
// The shape of what arrives. Throws UsageError for sizes that do not go together.
Shape check_all_to_all(const at::Tensor& x, int64_t split_dim, Sizes split_sizes, int64_t cat_dim, Sizes cat_sizes,
                       const Group& group) {
  check_sizes("all_to_all", x, split_dim, split_sizes, sum(split_sizes), *group);
  const int64_t kept = own_part(cat_sizes, *group);
  if (split_dim != cat_dim)
    check_sizes("all_to_all", x, cat_dim, cat_sizes, kept, *group);
  else  // along one dim, what a rank keeps is what it sends to itself
    TESSERA_CHECK(kept == own_part(split_sizes, *group), UsageError, "all_to_all on group '", group->name(),
                  "' along dim ", split_dim, ": rank ", group->rank(), " sends ", own_part(split_sizes, *group),
                  " to itself, and cannot receive ", kept, " from itself");
  const Shape piece = with_extent(x.sizes(), split_dim, own_part(split_sizes, *group));
  return with_extent(piece, cat_dim, sum(cat_sizes));
}

at::Tensor& all_to_all_out(const at::Tensor& x, int64_t split_dim, Sizes split_sizes, int64_t cat_dim, Sizes cat_sizes,
                           const Group& group, at::Tensor& out) {
  const size_t n = static_cast<size_t>(group->size());
  const int64_t own = split_sizes[static_cast<size_t>(group->rank())];
  std::vector<int64_t> in_splits(n), out_splits(n);
  Shape piece = with_extent(x.sizes(), split_dim, own);  // what this rank gets from r, once its cat extent is set
  for (size_t r = 0; r < n; r++) {
    in_splits[r] = product(with_extent(x.sizes(), split_dim, split_sizes[r]));
    out_splits[r] = product(with_extent(piece, cat_dim, cat_sizes[r]));
  }
  at::Tensor give;
  if (joins_memory(x.sizes(), split_dim, split_sizes)) {
    give = x.contiguous().view({-1});
  } else {
    give = at::empty({x.numel()}, x.options());
    int64_t begin = 0, offset = 0;
    for (size_t r = 0; r < n; r++) {
      at::Tensor from = x.narrow(split_dim, begin, split_sizes[r]);
      give.narrow(0, offset, from.numel()).view(from.sizes()).copy_(from);
      begin += split_sizes[r];
      offset += from.numel();
    }
  }
  if (joins_memory(out.sizes(), cat_dim, cat_sizes)) {
    at::Tensor flat = out.view({-1});
    group->add_pending(out, group->all_to_all_single(flat, give, out_splits, in_splits, kFunctional));
    return out;
  }
  at::Tensor wire = at::empty({out.numel()}, x.options());
  Work work = group->all_to_all_single(wire, give, out_splits, in_splits, kFunctional);
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
    record.kind = comm::Kind::Wait;
    record.family = comm::Family::Functional;
    record.dtype = x.scalar_type();
    record.posted = record.started = std::chrono::steady_clock::now();
    comm::notify_post(record);
  }
  auto work = group->take_pending(x);
  try {
    work.wait();
  } catch (...) {  // it was never filled, and must not count as ready
    group->add_pending(x, work);
    throw;
  }
  return x;
}

// The handle of an op, found once.
template <class Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

TORCH_LIBRARY(tessera, m) {
  m.class_<Communicator>("Group").def("name", [](const Group& self) { return self->name(); });
  // No result aliases an input: each is fresh. wait() makes the memory of its argument valid.
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
  // The same into memory that is given: of the result's shape, without gaps.
  m.def("all_reduce.out(Tensor x, str op, " TESSERA_GROUP ", *, Tensor(a!) out) -> Tensor(a!)");
  m.def("all_gather.out(Tensor x, int dim, int[] sizes, " TESSERA_GROUP ", *, Tensor(a!) out) -> Tensor(a!)");
  m.def("reduce_scatter.out(Tensor x, int dim, int[] sizes, str op, " TESSERA_GROUP
        ", *, Tensor(a!) out) -> Tensor(a!)");
  m.def("all_to_all.out(Tensor x, int split_dim, int[] split_sizes, int cat_dim, int[] cat_sizes, " TESSERA_GROUP
        ", *, Tensor(a!) out) -> Tensor(a!)");
  m.def("broadcast.out(Tensor x, int source, " TESSERA_GROUP ", *, Tensor(a!) out) -> Tensor(a!)");
  // Into the argument's own memory (inplace_ops.cpp).
  m.def("all_reduce_(Tensor(a!) x, str op, " TESSERA_GROUP ") -> Tensor(a!)");
  m.def("all_reduce_coalesced_(Tensor(a!)[] xs, str op, " TESSERA_GROUP ") -> ()");
  m.def("broadcast_(Tensor(a!) x, int source, " TESSERA_GROUP ") -> Tensor(a!)");
  m.def("all_gather_into_(Tensor(a!) out, Tensor x, " TESSERA_GROUP ") -> Tensor(a!)");
  m.def("reduce_scatter_into_(Tensor(a!) out, Tensor x, str op, " TESSERA_GROUP ") -> Tensor(a!)");
  // Between one tensor and runs of many (runs_ops.cpp).
  m.def("all_gather_into_runs_(Tensor(a!)[] outs, Tensor part, int[] runs, str label, " TESSERA_GROUP ") -> ()");
  m.def("reduce_scatter_runs_into_(Tensor(a!) out, Tensor[] ins, int[] runs, str op, str label, " TESSERA_GROUP
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
  m.impl("all_gather_into_runs_", detail::all_gather_into_runs_inplace);
  m.impl("reduce_scatter_runs_into_", detail::reduce_scatter_runs_into);
}

// By device: a compiled step takes an out= form only if it has a kernel of its own.
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
  static auto handle = op<decltype(all_reduce_kernel)>("tessera::all_reduce");
  return handle.call(x, to_string(reduce_op), group);
}
Tensors all_reduce_coalesced(at::TensorList xs, ReduceOp reduce_op, const Group& group) {
  static auto handle = op<decltype(all_reduce_coalesced_kernel)>("tessera::all_reduce_coalesced");
  return handle.call(xs, to_string(reduce_op), group);
}
at::Tensor all_gather(const at::Tensor& x, int64_t dim, Sizes sizes, const Group& group) {
  static auto handle = op<decltype(all_gather_kernel)>("tessera::all_gather");
  return handle.call(x, dim, sizes, group);
}
Tensors all_gather_coalesced(at::TensorList xs, Sizes dims, Sizes sizes, const Group& group) {
  static auto handle = op<decltype(all_gather_coalesced_kernel)>("tessera::all_gather_coalesced");
  return handle.call(xs, dims, sizes, group);
}
at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, Sizes sizes, ReduceOp reduce_op, const Group& group) {
  static auto handle = op<decltype(reduce_scatter_kernel)>("tessera::reduce_scatter");
  return handle.call(x, dim, sizes, to_string(reduce_op), group);
}
Tensors reduce_scatter_coalesced(at::TensorList xs, Sizes dims, Sizes sizes, ReduceOp reduce_op, const Group& group) {
  static auto handle = op<decltype(reduce_scatter_coalesced_kernel)>("tessera::reduce_scatter_coalesced");
  return handle.call(xs, dims, sizes, to_string(reduce_op), group);
}
at::Tensor all_to_all(const at::Tensor& x, int64_t split_dim, Sizes split_sizes, int64_t cat_dim, Sizes cat_sizes,
                      const Group& group) {
  static auto handle = op<decltype(all_to_all_kernel)>("tessera::all_to_all");
  return handle.call(x, split_dim, split_sizes, cat_dim, cat_sizes, group);
}
at::Tensor broadcast(const at::Tensor& x, int64_t source, const Group& group) {
  static auto handle = op<decltype(broadcast_kernel)>("tessera::broadcast");
  return handle.call(x, source, group);
}
void wait(const at::Tensor& x, const Group& group) {
  static auto handle = op<decltype(wait_kernel)>("tessera::wait");
  handle.call(x, group);
}

}  // namespace tessera::funcol
