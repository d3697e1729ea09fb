// any_rank, all_ranks, mean_over_ranks.
#include "tessera/base/error.h"
#include "tessera/comm/collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>

namespace tessera {
namespace {

double reduce_number(double mine, ReduceOp op, const GroupRef& group) {
  auto value = at::scalar_tensor(mine, at::kDouble);
  if (group->size() > 1) all_reduce(value, op, group);
  return value.item<double>();
}

}  // namespace

bool any_rank(bool mine, const GroupRef& group) { return reduce_number(mine, ReduceOp::Max, group) != 0; }
bool all_ranks(bool mine, const GroupRef& group) { return reduce_number(mine, ReduceOp::Min, group) != 0; }

double mean_over_ranks(double mine, const GroupRef& group) {
  return reduce_number(mine, ReduceOp::Sum, group) / static_cast<double>(group->size());
}

at::Tensor mean_over_ranks(const at::Tensor& mine, const GroupRef& group) {
  TESSERA_CHECK(mine.defined() && at::isFloatingType(mine.scalar_type()), UsageError,
                "mean_over_ranks: the tensor must have a floating-point dtype; found ",
                mine.defined() ? c10::str(mine.scalar_type(), mine.sizes()) : "an undefined tensor");
  const at::NoGradGuard no_grad;
  auto mean = mine.detach().clone();
  if (group->size() > 1) all_reduce(mean, ReduceOp::Avg, group);
  return mean;
}

}  // namespace tessera
