#include "tessera/data_parallel/fsdp/detail/engine/module_tree_setup.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/nn/module_tree.h"

#include <algorithm>
#include <functional>
#include <map>

namespace tessera::data_parallel::fsdp {
namespace {

using Units = std::vector<std::shared_ptr<ShardedModule>>;

std::string dotted(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

// A walk through the modules of a tree, with the sharded ones that a module lies in.
struct Walk {
  std::map<const c10::TensorImpl*, std::pair<const ShardedModule*, const Member*>> owners = {};
  std::map<const ShardedModule*, std::string> paths = {};
  std::vector<const ShardedModule*> inside = {};

  explicit Walk(const Units& units) {
    for (const auto& unit : units)
      for (const auto& member : unit->turn->unit->members())
        owners[member.handle.unsafeGetTensorImpl()] = {unit.get(), &member};
  }

  void into(const Module& module, const std::string& path) {
    const auto own = find(module);
    if (own) inside.push_back(own.get()), paths.emplace(own.get(), path);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) check(dotted(path, item.key()), item.value());
    for (const auto& child : module.named_children()) into(*child.value(), dotted(path, child.key()));
    if (own) inside.pop_back();
  }

  void check(const std::string& name, const at::Tensor& parameter) const {
    const auto found = parameter.defined() ? owners.find(parameter.unsafeGetTensorImpl()) : owners.end();
    if (found == owners.end()) return;
    const auto& [unit, member] = found->second;
    TESSERA_CHECK(std::find(inside.begin(), inside.end(), unit) != inside.end(), UsageError, "parameter ", name,
                  " is the same as ", member->name, " of the unit ", unit->turn->unit->name(),
                  " (tied), and is used outside of that unit, where it is not whole. Shard the modules that share it ",
                  "as one unit: fully_shard({a, b}), or leave both to the unit around them");
  }
};

int64_t numel_of(const ShardLayout& layout, size_t i) {
  int64_t total = 0;
  for (int64_t r = 0; r < layout.ranks(); r++) total += layout.in_shard(i, r).size;
  return total;
}

using NameOf = std::function<std::string(const ShardedModule&)>;

std::vector<std::string> describe(const Units& units, const NameOf& name_of) {
  std::vector<std::string> lines;
  for (const auto& sharded : units) {
    const auto& unit = *sharded->turn->unit;
    lines.push_back(c10::str("unit ", name_of(*sharded), " over ", unit.shards() ? unit.shards()->size() : 1, " x ",
                             unit.replicas() ? unit.replicas()->size() : 1, " ranks"));
    for (size_t i = 0; i < unit.members().size(); i++) {
      const auto& member = unit.members()[i];
      lines.push_back(c10::str("  ", member.name, " ",
                               member.sharded
                                   ? member.sharded->brief()
                                   : c10::str(member.handle.scalar_type(), " of ", numel_of(unit.layout(), i)),
                               member.handle.requires_grad() ? "" : " frozen"));
    }
  }
  return lines;
}

void agree_on(const Units& units, const NameOf& name_of) {
  const auto lines = describe(units, name_of);
  std::vector<comm::Group> asked;
  for (const auto& sharded : units)
    for (const auto& group : {sharded->turn->unit->shards(), sharded->turn->unit->replicas()}) {
      if (!group || std::find(asked.begin(), asked.end(), group) != asked.end()) continue;
      asked.push_back(group);
      comm::agree(group, "the first forward of a sharded module", lines);
    }
}

}  // namespace

void make_tree(ShardedModule& root) {
  const auto units = find_all(*root.module);
  for (const auto& sharded : units)
    TESSERA_CHECK(!sharded->schedule, UsageError, "module ", class_name(*sharded->module), " (unit ",
                  sharded->turn->unit->name(), ") ran by itself before ", class_name(*root.module),
                  ", which it is part of; run the outer one first");
  Walk walk(units);
  walk.into(*root.module, "");
  const auto name_of = [&](const ShardedModule& sharded) {
    const auto& path = walk.paths[&sharded];
    return path.empty() ? class_name(*sharded.module) : path;
  };
  agree_on(units, name_of);
  auto schedule = std::make_shared<Schedule>();
  for (const auto& sharded : units) {
    sharded->schedule = schedule;
    schedule->add(sharded->turn, name_of(*sharded));
  }
}

}  // namespace tessera::data_parallel::fsdp
