#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"

// Ops that LibTorch composes of other ops. Its code runs on the distributed tensors, and each op inside has its own
// strategies. An op is listed here only if that code uses ops alone. Code that makes its results with empty() would
// make plain tensors; such an op needs a rule, or it is gathered.
namespace tessera::rules {

void register_decomposed(Registry& to) {
  Family family(to, "decomposed");
  for (const std::string op : {
           "_amp_foreach_non_finite_check_and_unscale",
           "_batch_norm_no_update",
           "_euclidean_dist",
           "_fused_adagrad",
           "_fused_adagrad.tensor_lr",
           "_fused_adam",
           "_fused_adam.tensor_lr",
           "_fused_adamw",
           "_fused_adamw.tensor_lr",
           "_fused_sgd",
           "_fused_sgd.tensor_lr",
           "_is_all_true",
           "_is_any_true",
           "_linalg_check_errors",
           "_native_batch_norm_legit_functional",
           "_native_batch_norm_legit_no_training",
           "_safe_softmax",
           "_unsafe_index.Tensor",
           "_unsafe_index_put",
           "allclose",
           "cholesky_solve",
           "count_nonzero",
           "dist",
           "resize_as_",
           "rot90",
       })
    family.op(op, [name = "aten::" + op](const OpQuery&) {
      Rule rule;
      rule.decompose = name;
      return rule;
    });
}

}  // namespace tessera::rules
