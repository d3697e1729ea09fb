#include "tessera/data_parallel/fsdp/detail/engine/module_tree_setup.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/nn/module_tree.h"

#include <algorithm>
#include <functional>
#include <map>

namespace tessera::data_parallel::fsdp {
namespace {

using ShardedModules = std::vector<std::shared_ptr<ShardedModule>>;

std::string join_path(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

// Visits the modules of a tree, finds the path of each sharded module, and checks that each parameter is used only
// inside the modules of its group.
struct TreeVisitor {
  std::map<const c10::TensorImpl*, std::pair<const ShardedModule*, const FSDPParam*>> owners = {};
  std::map<const ShardedModule*, std::string> paths = {};
  std::vector<const ShardedModule*> enclosing = {};  // sharded modules around the current one

  explicit TreeVisitor(const ShardedModules& all) {
    for (const auto& sharded : all)
      for (const auto& param : sharded->group().params())
        owners[param.tensor.unsafeGetTensorImpl()] = {sharded.get(), &param};
  }

  void visit(const Module& module, const std::string& path) {
    const auto own = find_sharded_module(module);
    if (own) enclosing.push_back(own.get()), paths.emplace(own.get(), path);
    for (const auto& item : module.named_parameters(/*recurse=*/false))
      check(join_path(path, item.key()), item.value());
    for (const auto& child : module.named_children()) visit(*child.value(), join_path(path, child.key()));
    if (own) enclosing.pop_back();
  }

  void check(const std::string& name, const at::Tensor& parameter) const {
    const auto found = parameter.defined() ? owners.find(parameter.unsafeGetTensorImpl()) : owners.end();
    if (found == owners.end()) return;
    const auto& [sharded, param] = found->second;
    TESSERA_CHECK(std::find(enclosing.begin(), enclosing.end(), sharded) != enclosing.end(), UsageError, "parameter ",
                  name, " is the same as ", param->name, " of the parameter group ", sharded->group().name(),
                  " (tied), and is used outside that group, where it is not unsharded. Shard the modules that share ",
                  "it as one group: fully_shard({a, b}), or shard only the module around them");
  }
};

int64_t numel_over_ranks(const ShardLayout& layout, size_t i) {
  int64_t total = 0;
  for (int64_t r = 0; r < layout.ranks(); r++) total += layout.range_in_shard(i, r).size;
  return total;
}

using NameOf = std::function<std::string(const ShardedModule&)>;

std::vector<std::string> describe_groups(const ShardedModules& all, const NameOf& name_of) {
  std::vector<std::string> lines;
  for (const auto& sharded : all) {
    const auto& group = sharded->group();
    lines.push_back(c10::str("parameter group ", name_of(*sharded), " over ",
                             group.shard_group() ? group.shard_group()->size() : 1, " x ",
                             group.replicate_group() ? group.replicate_group()->size() : 1, " ranks"));
    for (size_t i = 0; i < group.params().size(); i++) {
      const auto& [name, tensor, unsharded_spec, sharded_spec] = group.params()[i];
      const auto shape = sharded_spec ? sharded_spec->brief()
                                      : c10::str(tensor.scalar_type(), " of ", numel_over_ranks(group.layout(), i));
      lines.push_back(c10::str("  ", name, " ", shape, tensor.requires_grad() ? "" : " frozen"));
    }
  }
  return lines;
}

// Throws UsageError on all ranks if their parameter groups differ.
void check_ranks_agree(const ShardedModules& all, const NameOf& name_of) {
  const auto lines = describe_groups(all, name_of);
  std::vector<comm::Group> checked;
  for (const auto& sharded : all)
    for (const auto& group : {sharded->group().shard_group(), sharded->group().replicate_group()}) {
      if (!group || std::find(checked.begin(), checked.end(), group) != checked.end()) continue;
      checked.push_back(group);
      comm::require_same_on_all_ranks(group, "the first forward of a sharded module", lines);
    }
}

}  // namespace

void set_up_module_tree(ShardedModule& root) {
  const auto all = find_sharded_modules(*root.module);
  for (const auto& sharded : all)
    TESSERA_CHECK(!sharded->schedule, UsageError, "module ", class_name(*sharded->module), " (parameter group ",
                  sharded->group().name(), ") ran by itself before ", class_name(*root.module),
                  ", which it is part of; run the outer one first");
  TreeVisitor visitor(all);
  visitor.visit(*root.module, "");
  const auto name_of = [&](const ShardedModule& sharded) {
    const auto& path = visitor.paths[&sharded];
    return path.empty() ? class_name(*sharded.module) : path;
  };
  check_ranks_agree(all, name_of);
  auto schedule = std::make_shared<Schedule>();
  for (const auto& sharded : all) {
    sharded->schedule = schedule;
    schedule->add(sharded->scheduled, name_of(*sharded));
  }
  schedule->start();
}

}  // namespace tessera::data_parallel::fsdp
