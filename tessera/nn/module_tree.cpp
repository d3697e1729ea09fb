#include "tessera/nn/module_tree.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/holder.h"

#include <c10/util/Type.h>

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

template <class Items>
std::string names_of(const Items& items) {
  std::string names;
  for (const auto& item : items) names += (names.empty() ? "" : ", ") + item.key();
  return names.empty() ? "none" : names;
}

// Splits a.b.c into a.b and c.
std::pair<std::string_view, std::string_view> split_last(std::string_view name) {
  const auto dot = name.rfind('.');
  if (dot == std::string_view::npos) return {"", name};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

template <class Items>
at::Tensor find_tensor(const char* kind, std::string_view name, const Module& owner, const Items& items) {
  const auto leaf = std::string(split_last(name).second);
  const auto* found = items.find(leaf);
  TESSERA_CHECK(found && found->defined(), UsageError, kind, " '", name, "' does not exist: its module, a ",
                class_name(owner), ", has ", kind, "s ", names_of(items));
  return *found;
}

}  // namespace

std::string class_name(const Module& module) {
  std::string name = c10::demangle(typeid(module).name());
  constexpr std::string_view hooked = "tessera::Hooked<";
  if (name.starts_with(hooked)) name = name.substr(hooked.size(), name.size() - hooked.size() - 1);
  const auto arguments = name.find('<');  // drop template arguments
  if (arguments != std::string::npos) name.resize(arguments);
  const auto space = name.rfind("::");
  if (space != std::string::npos) name = name.substr(space + 2);
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

std::shared_ptr<Module> get_submodule(Module& root, std::string_view name) {
  auto module = root.shared_from_this();
  for (size_t begin = 0; begin < name.size();) {
    const auto end = std::min(name.find('.', begin), name.size());
    const auto children = module->named_children();
    const auto* child = children.find(std::string(name.substr(begin, end - begin)));
    const auto parent = begin == 0 ? std::string("the root") : "'" + std::string(name.substr(0, begin - 1)) + "'";
    TESSERA_CHECK(child, UsageError, "module '", name, "' does not exist: ", parent, ", a ", class_name(*module),
                  ", has children ", names_of(children));
    module = *child;
    begin = end + 1;
  }
  return module;
}

at::Tensor get_parameter(Module& root, std::string_view name) {
  const auto owner = get_submodule(root, split_last(name).first);
  return find_tensor("parameter", name, *owner, owner->named_parameters(/*recurse=*/false));
}

at::Tensor get_buffer(Module& root, std::string_view name) {
  const auto owner = get_submodule(root, split_last(name).first);
  return find_tensor("buffer", name, *owner, owner->named_buffers(/*recurse=*/false));
}

namespace detail {
namespace {

// Appends the path from `root` to `wanted` to `path`. False if `wanted` is not below `root`.
bool find_path(const Module& root, const Module* wanted, std::string& path) {
  if (&root == wanted) return true;
  for (const auto& child : root.named_children()) {
    const auto length = path.size();
    path += "." + child.key();
    if (find_path(*child.value(), wanted, path)) return true;
    path.resize(length);
  }
  return false;
}

}  // namespace

std::string path_of(const ModuleFrame& frame) {
  const auto& module = *static_cast<const Module*>(frame.module);
  // Search below the enclosing modules, innermost first: usually the direct parent contains the module.
  for (const auto* outer = frame.outer; outer; outer = outer->outer) {
    if (outer->name != &path_of) break;
    std::string path = outer->name(*outer);
    if (find_path(*static_cast<const Module*>(outer->module), &module, path)) return path;
  }
  const auto own = class_name(module);
  return frame.outer ? frame.outer->name(*frame.outer) + "/" + own : own;  // not registered below an enclosing module
}

}  // namespace detail
namespace detail {

void check_saved_as_one_file(const Module& module) {
  const auto check = [&](const auto& named) {
    for (const auto& item : named)
      TESSERA_CHECK(
          !item.value().defined() || !is_dtensor(item.value()), UsageError, "torch::save: '", item.key(), "' of ",
          class_name(module), " is ", DTensor(item.value().detach()),
          ", a distributed tensor, of which a rank has one shard. Use ts::torch_save(model, path) for a file that "
          "torch::load reads, or ts::TrainingState for a checkpoint");
  };
  check(module.named_parameters());
  check(module.named_buffers());
}

}  // namespace detail
}  // namespace tessera
