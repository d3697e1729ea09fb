#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/policy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <mutex>
#include <string>
#include <unordered_set>

// Kernels of ops that return a host value instead of a tensor: item(), equal(), comparisons of metadata. Sharding rules
// cannot describe them.
namespace tessera::detail {

void register_random_kernels(torch::Library& aten, std::unordered_set<std::string>& done);  // random_kernels.cpp

namespace {

// Redistribution that the user did not request, so CommPolicy applies.
at::Tensor redistribute_implicitly(const at::Tensor& t, PlacementsRef placements, const char* op) {
  const auto& spec = meta_of(t).spec;
  auto to = with_placements(*spec, placements);
  if (to == spec) return t;
  if (redistribute::plan_between(*spec, *to).communicates() && comm_policy() != CommPolicy::Allow)
    check_policy(c10::str(op, " redistributes ", spec->describe(), " to ", to_string(placements), "."));
  return redistribute_no_grad(t, to, /*is_explicit=*/false);
}

at::Scalar item(const at::Tensor& t) {
  const Placements replicated(meta_of(t).spec->placements.size(), Replicate());
  return at::_local_scalar_dense(local_of(redistribute_implicitly(t, replicated, "item()")));
}

bool is_same_size(const at::Tensor& a, const at::Tensor& b) { return a.sizes() == b.sizes(); }

// Each rank compares its local tensors, then an all-reduce combines the results. True if all ranks found them equal.
bool equal(const at::Tensor& a, const at::Tensor& b) {
  TESSERA_CHECK(is_dtensor(a) && is_dtensor(b), UsageError,
                "equal: one tensor is distributed and the other is plain; "
                "compare full_tensor() with the plain one, or distribute the plain one");
  TESSERA_CHECK(meta_of(a).spec->mesh == meta_of(b).spec->mesh, UsageError,
                "equal: the tensors are on different meshes; call full_tensor() on both and compare these");
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  Placements common(meta_of(a).spec->placements);
  for (auto& p : common)
    if (p.is_partial()) p = Replicate();
  const auto x = redistribute_implicitly(a, common, "equal()"), y = redistribute_implicitly(b, common, "equal()");
  if (meta_of(a).spec->mesh.size() > 1 && comm_policy() != CommPolicy::Allow)
    check_policy(c10::str("equal() on ", meta_of(a).spec->describe(), " all-reduces the results of all ranks."));
  at::AutoDispatchBelowADInplaceOrView below;
  auto same = at::full({1}, at::equal(local_of(x), local_of(y)) ? 1 : 0,
                       at::TensorOptions().dtype(at::kInt).device(local_of(x).device()));
  const auto& mesh = meta_of(a).spec->mesh;
  for (int64_t axis = 0; axis < mesh.ndim(); axis++) {
    const auto group = mesh.get_group(axis);
    same = funcol::all_reduce(same, ReduceOp::Min, group);
    funcol::wait(same, group);
  }
  return at::_local_scalar_dense(same).toInt() == 1;
}

}  // namespace

namespace {

// A parameter that set_data() makes distributed keeps its plain TensorImpl, and gets a copy of the error texts of
// `from`: of data_ptr(), and of storage(), which torch::save reads.
template <class Impl>
void set_error_texts(Impl& from) {
  static std::mutex mutex;  // threads may share a tensor
  const std::lock_guard lock(mutex);
  if constexpr (requires { from.release_storage_and_set_meta_custom_data_ptr_error_msg_(std::string()); })
    from.release_storage_and_set_meta_custom_data_ptr_error_msg_(
        "a DTensor has no data_ptr() and no storage: use to_local() or full_tensor(), or print DTensor(t). A module "
        "with "
        "distributed parameters is saved with ts::torch_save(model, path), for a file that torch::load reads, or with "
        "ts::TrainingState; tensors are saved with ts::dcp::save");
  else
    (void)from.has_storage();  // sets the text of data_ptr(), see DTensorImpl
}

}  // namespace

bool accept_any_data(const at::Tensor& /*self*/, const at::Tensor& from) {
  if (is_dtensor(from)) set_error_texts(*from.unsafeGetTensorImpl());
  return true;
}

void register_special_kernels(torch::Library& aten, std::unordered_set<std::string>& done) {
  aten.impl("_local_scalar_dense", TORCH_FN(item));
  aten.impl("is_same_size", TORCH_FN(is_same_size));
  aten.impl("equal", TORCH_FN(equal));
  // set_data() calls this before it makes a plain parameter distributed, or a distributed one plain.
  aten.impl("_has_compatible_shallow_copy_type", TORCH_FN(accept_any_data));
  for (const char* name : {"_local_scalar_dense", "is_same_size", "equal", "_has_compatible_shallow_copy_type"})
    done.insert(std::string("aten::") + name);
  register_random_kernels(aten, done);
}

}  // namespace tessera::detail
