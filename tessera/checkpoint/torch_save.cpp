// torch::save writes one archive per module, nested as the modules are. These functions walk the modules in the same
// way, with the names and full tensors of get_model_state_dict.
#include "tessera/base/error.h"
#include "tessera/checkpoint/training_state.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/data_parallel/detail/wrapper_module.h"
#include "tessera/data_parallel/fsdp/state_dict.h"

#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <filesystem>

namespace tessera {
namespace {

// The module inside of DistributedDataParallel and FullyShardedDataParallel: files have no entry for these wrappers.
const torch::nn::Module& without_wrapper(const torch::nn::Module& module) {
  if (dynamic_cast<const data_parallel::WrapperModule*>(&module))
    for (const auto& child : module.named_children())
      if (child.key() == "module") return without_wrapper(*child.value());
  return module;
}

// The names of `dict` that are directly below `prefix`, without it.
std::vector<std::string> names_below(const StateDict& dict, const std::string& prefix) {
  std::vector<std::string> names;
  for (const auto& [name, value] : dict)
    if (name.starts_with(prefix) && name.find('.', prefix.size()) == std::string::npos)
      names.push_back(name.substr(prefix.size()));
  return names;
}

void write_module(const torch::nn::Module& module, const std::string& prefix, const StateDict& dict,
                  torch::serialize::OutputArchive& archive) {
  for (const auto& name : names_below(dict, prefix)) archive.write(name, dict.at(prefix + name));
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::OutputArchive below(archive.compilation_unit());
    write_module(without_wrapper(*child.value()), prefix + child.key() + ".", dict, below);
    archive.write(child.key(), below);
  }
}

void read_module(const torch::nn::Module& module, const std::string& prefix, const StateDict& expected,
                 torch::serialize::InputArchive& archive, StateDict& dict) {
  for (const auto& name : names_below(expected, prefix)) {
    at::Tensor value;
    if (archive.try_read(name, value)) dict.insert(prefix + name, value.detach());
  }
  for (const auto& child : module.named_children()) {
    torch::serialize::InputArchive below;
    if (child.value()->is_serializable() && archive.try_read(child.key(), below))
      read_module(without_wrapper(*child.value()), prefix + child.key() + ".", expected, below, dict);
  }
}

}  // namespace

void torch_save(torch::nn::Module& module, const std::string& path) {
  const auto dict = get_model_state_dict(module, {.full_state_dict = true, .cpu_offload = true, .rank0_only = true});
  const auto world = World::current();
  const auto write = [&] {
    if (world.rank() != 0) return std::string();
    torch::serialize::OutputArchive archive;
    write_module(without_wrapper(module), "", dict, archive);
    const auto partial = path + ".partial";
    archive.save_to(partial);
    std::error_code error;
    std::filesystem::rename(partial, path, error);
    TESSERA_CHECK(!error, SystemError, "torch_save: cannot rename '", partial, "' to '", path, "': ", error.message());
    return std::string();
  };
  comm::gather_decide_broadcast(world.group(), "torch_save", write, [](const auto&) { return std::string(); });
}

void torch_load(torch::nn::Module& module, const std::string& path) {
  const auto expected = get_model_state_dict(module);
  StateDict dict;
  const auto read = [&] {
    TESSERA_CHECK(std::filesystem::exists(path), UsageError, "torch_load: '", path, "' does not exist");
    torch::serialize::InputArchive archive;
    archive.load_from(path, at::kCPU);
    read_module(without_wrapper(module), "", expected, archive, dict);
    return std::string();
  };
  comm::gather_decide_broadcast(World::current().group(), "torch_load", read,
                                [](const auto&) { return std::string(); });
  set_model_state_dict(module, dict);
}

void copy_module_state(const torch::nn::Module& from, torch::nn::Module& to) {
  load_state_dict(to, state_dict(from));
  const auto source = from.named_parameters();
  for (const auto& item : to.named_parameters())
    if (const auto* same = source.find(item.key())) item.value().requires_grad_(same->requires_grad());
  const auto modes = from.named_modules();
  for (const auto& item : to.named_modules())
    if (const auto* same = modes.find(item.key())) item.value()->train((*same)->is_training());
}

}  // namespace tessera
