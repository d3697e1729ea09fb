#include "tessera/data_parallel/fsdp/detail/api/wrap_policy.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/detail/api/ignored_modules.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/nn/hooks.h"
#include "tessera/nn/module_tree.h"

#include <unordered_set>

namespace tessera {

AutoWrapPolicy size_based_auto_wrap_policy(int64_t min_num_params) {
  return [min_num_params](const WrapQuestion& question) {
    const bool can_be_wrapped =
        has_hook_point(question.module) && !data_parallel::fsdp::is_module_container(question.module);
    return question.numel >= min_num_params && (question.recurse || can_be_wrapped);
  };
}

AutoWrapPolicy lambda_auto_wrap_policy(std::function<bool(torch::nn::Module& module)> wraps) {
  return
      [wraps = std::move(wraps)](const WrapQuestion& question) { return question.recurse || wraps(question.module); };
}

namespace data_parallel::fsdp {
namespace {

class PolicyVisitor {
 public:
  PolicyVisitor(const AutoWrapPolicy& policy, const IgnoredModules& ignored) : policy_(policy), ignored_(ignored) {}

  // Returns the number of elements at and below `module` that are in wrapped modules.
  int64_t visit(Module& module, const std::string& path, bool is_root) {
    if (!seen_.insert(&module).second) return 0;
    int64_t numel = 0;
    for (const auto& [name, value] : ignored_.parameters_to_shard(module)) numel += value.numel();
    if (!policy_({module, /*recurse=*/true, numel})) return 0;
    int64_t wrapped = 0;
    for (const auto& child : module.named_children()) {
      const auto name = path.empty() ? child.key() : path + "." + child.key();
      if (!ignored_.has(*child.value())) wrapped += visit(*child.value(), name, false);
    }
    if (is_root || !policy_({module, /*recurse=*/false, numel - wrapped})) return wrapped;
    TESSERA_CHECK(!find_sharded_module(module), UsageError, "auto_wrap_policy: ", path, " (", class_name(module),
                  ") is sharded already; do not shard it before, or exclude it from the policy");
    found.push_back(&module);
    return numel;
  }

  std::vector<Module*> found;

 private:
  const AutoWrapPolicy& policy_;
  const IgnoredModules& ignored_;
  std::unordered_set<const Module*> seen_;
};

}  // namespace

std::vector<Module*> modules_to_wrap(Module& root, const AutoWrapPolicy& policy, const IgnoredModules& ignored) {
  PolicyVisitor visitor(policy, ignored);
  visitor.visit(root, "", true);
  return std::move(visitor.found);
}

}  // namespace data_parallel::fsdp
}  // namespace tessera
