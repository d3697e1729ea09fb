#include "tessera/tensor_parallel/detail/local_class_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

namespace tessera::detail {
namespace {

using at::IntArrayRef;
using at::Tensor;

// On a GPU the check is asynchronous, because reading its result would synchronize with the device.
void check_targets(const Tensor& target, int64_t num_classes, int64_t ignore_index) {
  if (target.numel() == 0) return;
  const auto good = target.ge(0).logical_and_(target.lt(num_classes)).logical_or_(target.eq(ignore_index));
  if (!target.is_cpu()) return at::_assert_async(good.all(), "cross entropy: a target is out of bounds");
  if (good.all().item<bool>()) return;
  const auto bad = target.masked_select(good.logical_not())[0].item<int64_t>();
  TORCH_CHECK_INDEX(false, "cross entropy: target ", bad, " is out of bounds; classes are 0 to ", num_classes - 1,
                    ", and ignore_index is ", ignore_index);
}

// The local index of each target. `elsewhere` is true, and the index 0, where another rank has the class.
struct LocalTargets {
  Tensor index, elsewhere;  // (N, d1, ...)
};
LocalTargets find_targets(const Tensor& target, IntArrayRef runs, int64_t ignore_index) {
  auto index = at::zeros_like(target);
  auto elsewhere = at::zeros_like(target, target.options().dtype(at::kBool)).fill_(true);
  int64_t before = 0;  // the number of classes in the previous runs
  for (size_t i = 0; i + 1 < runs.size(); i += 2) {
    const auto absent = target.lt(runs[i]).logical_or_(target.ge(runs[i + 1]));
    index = at::where(absent, index, target.sub(runs[i] - before));
    elsewhere.logical_and_(absent);
    before += runs[i + 1] - runs[i];
  }
  elsewhere.logical_or_(target.eq(ignore_index));
  return {index.masked_fill_(elsewhere, 0), elsewhere};
}

Tensor pick_class_kernel(const Tensor& x, const Tensor& target, int64_t dim, IntArrayRef runs, int64_t num_classes,
                         int64_t ignore_index) {
  check_targets(target, num_classes, ignore_index);
  if (x.size(dim) == 0) return at::zeros(target.sizes(), x.options());
  const auto found = find_targets(target, runs, ignore_index);
  return x.gather(dim, found.index.unsqueeze(dim)).squeeze(dim).masked_fill_(found.elsewhere, 0);
}

Tensor& add_to_class_kernel(Tensor& x, const Tensor& target, const Tensor& value, int64_t dim, IntArrayRef runs,
                            int64_t ignore_index) {
  if (x.size(dim) == 0) return x;
  const auto found = find_targets(target, runs, ignore_index);
  return x.scatter_add_(dim, found.index.unsqueeze(dim), value.masked_fill(found.elsewhere, 0).unsqueeze(dim));
}

}  // namespace

Tensor pick_class(const Tensor& x, const Tensor& target, const LocalClasses& classes) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tessera::pick_class", "").typed<decltype(pick_class_kernel)>();
  return op.call(x, target, classes.dim, classes.runs, classes.num_classes, classes.ignore_index);
}

void add_to_class_(Tensor& x, const Tensor& target, const Tensor& value, const LocalClasses& classes) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::add_to_class_", "")
                             .typed<decltype(add_to_class_kernel)>();
  op.call(x, target, value, classes.dim, classes.runs, classes.ignore_index);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("pick_class(Tensor x, Tensor target, int dim, int[] runs, int num_classes, int ignore_index) -> Tensor");
  m.def(
      "add_to_class_(Tensor(a!) x, Tensor target, Tensor value, int dim, int[] runs, int ignore_index) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("pick_class", pick_class_kernel);
  m.impl("add_to_class_", add_to_class_kernel);
}

}  // namespace tessera::detail
