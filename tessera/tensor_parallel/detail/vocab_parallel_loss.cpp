#include "tessera/tensor_parallel/detail/vocab_parallel_loss.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace tessera::detail {

int64_t class_dim(const at::Tensor& scores) { return scores.dim() == 1 ? 0 : 1; }

namespace {

using at::Tensor;

Sizes sizes_without(c10::IntArrayRef sizes, int64_t dim) {
  Sizes rest(sizes.begin(), sizes.end());
  rest.erase(rest.begin() + dim);
  return rest;
}

// Placements of a tensor without the class dim. An axis that shards the classes becomes replicated. Dims after the
// class dim move down by one.
Placements placements_without(PlacementsRef placements, int64_t dim) {
  Placements rest;
  for (const auto& p : placements)
    rest.push_back(!p.is_sharded() || p.dim == dim ? Replicate() : p.with_dim(p.dim > dim ? p.dim - 1 : p.dim));
  return rest;
}

void check_arguments(const char* op, const Tensor& scores, const Tensor& target, const CrossEntropyOptions& options) {
  TESSERA_CHECK(at::isFloatingType(scores.scalar_type()), UsageError, op, ": scores are ", scores.scalar_type(),
                "; use a floating point dtype");
  TESSERA_CHECK(scores.dim() > 0, UsageError, op, ": scores have no dims; pass (C) or (N, C, ...)");
  TESSERA_CHECK(target.defined(), UsageError, op, ": target is undefined");
  TESSERA_CHECK(target.scalar_type() == at::kLong || target.scalar_type() == at::kByte, UsageError, op, ": target is ",
                target.scalar_type(),
                "; pass class indices, as Long. Probabilities need unsharded classes: redistribute the scores to "
                "Replicate()");
  const auto expected = sizes_without(scores.sizes(), class_dim(scores));
  TESSERA_CHECK(target.sizes() == c10::IntArrayRef(expected), UsageError, op, ": scores of sizes ", scores.sizes(),
                " need a target of sizes ", c10::IntArrayRef(expected), "; found ", target.sizes(),
                is_dtensor(target) ? ""
                                   : ". A plain target is the global target, the same on every rank; wrap a local "
                                     "shard with DTensor::from_local");
  if (const auto& weight = options.weight; weight.defined()) {
    const auto classes = scores.size(class_dim(scores));
    TESSERA_CHECK(weight.dim() == 1 && weight.size(0) == classes && weight.scalar_type() == scores.scalar_type(),
                  UsageError, op, ": weight is ", weight.scalar_type(), " of sizes ", weight.sizes(), "; pass a ",
                  scores.scalar_type(), " tensor with one value for each of the ", classes, " classes");
  }
  TESSERA_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1, UsageError, op, ": label_smoothing is ",
                options.label_smoothing, "; it must be between 0 and 1");
  TESSERA_CHECK(options.reduction >= 0 && options.reduction < at::Reduction::END, UsageError, op, ": reduction is ",
                static_cast<int>(options.reduction), "; use at::Reduction::None, Mean or Sum");
}

// The local tensor of `t` with these placements. A plain `t` is a global tensor, the same on every rank.
Tensor local_with_placements(const Tensor& t, const char* name, const TensorSpec& scores, PlacementsRef placements,
                             const char* op) {
  if (!is_dtensor(t)) {
    const bool sharded = std::ranges::any_of(placements, [](const auto& p) { return p.is_sharded(); });
    if (!sharded) return t.detach();
    return local_of(distribute_tensor(t.detach(), scores.mesh, placements, {.src_data_rank = std::nullopt}));
  }
  const auto& spec = *meta_of(t).spec;
  TESSERA_CHECK(spec.mesh == scores.mesh, UsageError, op, ": ", name, " is ", spec.describe(), ", the scores are ",
                scores.describe(), "; distribute both over the same mesh");
  return local_of(redistribute_no_grad(t, with_placements(spec, placements)));
}

}  // namespace

VocabParallelLoss prepare_loss(const char* op, const Tensor& scores, const Tensor& target,
                               const CrossEntropyOptions& options) {
  check_arguments(op, scores, target, options);
  Placements placements(meta_of(scores).spec->placements);
  for (auto& p : placements)
    if (p.is_partial()) p = Replicate();

  VocabParallelLoss loss;
  loss.scores = meta_of(scores).spec->has_partial() ? redistribute(scores, placements) : scores;
  const auto& spec = *meta_of(loss.scores).spec;
  const int64_t dim = class_dim(scores);
  loss.classes = {dim, {}, scores.size(dim), options.ignore_index};
  for (const auto& run : spec.local_ranges(dim))
    loss.classes.runs.insert(loss.classes.runs.end(), {run.begin, run.end});
  for (size_t axis = 0; axis < placements.size(); axis++)
    if (placements[axis].is_sharded(dim)) loss.groups.push_back(spec.mesh.get_group(static_cast<int64_t>(axis)));

  const auto sizes = sizes_without(spec.sizes, dim);
  const auto positions = placements_without(placements, dim);
  loss.position_spec = intern(spec.mesh, positions, sizes, tessera::contiguous_strides(sizes),
                              at::toOpMathType(spec.dtype), spec.device);
  loss.target = local_with_placements(target, "target", spec, positions, op).to(at::kLong);
  if (options.weight.defined()) {
    const Placements replicated(placements.size(), Replicate());
    loss.weight = local_with_placements(options.weight, "weight", spec, replicated, op).to(loss.compute_dtype());
  }
  loss.smoothing = options.label_smoothing;
  return loss;
}

}  // namespace tessera::detail
