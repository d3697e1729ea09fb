#include "tessera/data_parallel/fsdp/state_dict.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/comm/world.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/fsdp/detail/state/flat_optimizer.h"
#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"
#include "tessera/data_parallel/fsdp/detail/state/unflattened_parameters.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/module_tree.h"
#include "tessera/state/detail/fit_value.h"
#include "tessera/state/detail/plan_load.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <sstream>

namespace tessera::data_parallel::fsdp {
namespace {

void check_options(const char* what, const StateDictOptions& options) {
  TESSERA_CHECK(!options.rank0_only || options.full_state_dict, UsageError, what,
                ": rank0_only without full_state_dict: rank 0 has only its own shards; set full_state_dict");
}

bool is_rank0() { return World::current().rank() == 0; }

// ---- broadcast of a dict that only rank 0 has

std::string describe_dict(const StateDict& dict) {
  std::ostringstream text;
  for (const auto& [name, value] : dict) {
    text << name << ' ' << static_cast<int>(value.scalar_type());
    for (const int64_t size : value.sizes()) text << ' ' << size;
    text << '\n';
  }
  return text.str();
}

at::Tensor empty_from(std::istringstream& line, c10::Device device) {
  int dtype = 0;
  line >> dtype;
  std::vector<int64_t> sizes;
  for (int64_t size = 0; line >> size;) sizes.push_back(size);
  return at::empty(sizes, at::TensorOptions(device).dtype(static_cast<c10::ScalarType>(dtype)));
}

StateDict broadcast_dict_from_rank0(const StateDict& dict, c10::Device device) {
  const auto group = World::current().group();
  if (group->size() == 1) return dict;
  std::string distributed;
  for (const auto& [name, value] : dict)
    if (is_rank0() && is_dtensor(value)) distributed = name;
  const auto text = comm::broadcast_text(
      group, "set_model_state_dict", is_rank0() ? distributed.empty() ? describe_dict(dict) : "!" + distributed : "");
  TESSERA_CHECK(text.empty() || text[0] != '!', UsageError, "broadcast_from_rank0: '", text.substr(1),
                "' is a DTensor, and rank 0 has only its local tensor; give full tensors (full_state_dict)");
  StateDict received;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    auto value = is_rank0() ? dict.at(name).detach().to(device).contiguous() : empty_from(words, device);
    comm::broadcast_(value, 0, group);
    funcol::wait(value, group);
    received.insert(name, std::move(value));
  }
  return received;
}

c10::Device compute_device_of(const Module& module) {
  for (const auto& sharded : find_sharded_modules(module))
    if (!sharded->group().params().empty()) return sharded->group().device();
  for (const auto& parameter : module.parameters()) return local_or_self(parameter).device();
  return c10::kCPU;
}

StateDict load_source(const StateDict& given, const Module& module, const StateDictOptions& options) {
  return options.broadcast_from_rank0 ? broadcast_dict_from_rank0(given, compute_device_of(module)) : given;
}

}  // namespace
}  // namespace tessera::data_parallel::fsdp

namespace tessera {

namespace fsdp_engine = data_parallel::fsdp;

StateDict get_model_state_dict(torch::nn::Module& module, const StateDictOptions& options) {
  fsdp_engine::check_options("get_model_state_dict", options);
  const at::NoGradGuard no_grad;
  const fsdp_engine::UnflattenedParameters unflattened(module);
  const fsdp_engine::StateDictForm form{options.full_state_dict, options.cpu_offload};
  const bool returns_dict = !options.rank0_only || fsdp_engine::is_rank0();
  std::unordered_map<const void*, at::Tensor> flat_values;  // of flattened parameters
  for (const auto& sharded : unflattened.flat_modules) {
    const auto& group = sharded->group();
    const auto gathered = fsdp_engine::gather_shard(group, group.flat_param());
    for (size_t i = 0; i < group.params().size(); i++) {
      const auto& param = group.params()[i];
      auto value = form.convert_flat(*sharded, param, fsdp_engine::param_in_gathered(group, i, gathered));
      if (returns_dict) flat_values.emplace(param.tensor.unsafeGetTensorImpl(), std::move(value));
    }
  }
  StateDict dict;
  for (size_t s = 0; s < unflattened.slots.size(); s++) {
    const auto& slot = unflattened.slots[s];
    if (!unflattened.flat_refs[s].sharded) {
      auto value = form.convert(slot.tensor);
      if (returns_dict) dict.insert(slot.name, std::move(value));
    } else if (returns_dict) {
      dict.insert(slot.name, flat_values.at(unflattened.flat_refs[s].param().tensor.unsafeGetTensorImpl()));
    }
  }
  return dict;
}

LoadReport set_model_state_dict(torch::nn::Module& module, const StateDict& given, const StateDictOptions& options) {
  const auto dict = fsdp_engine::load_source(given, module, options);
  const fsdp_engine::UnflattenedParameters unflattened(module);
  const auto plan = detail::plan_load(module, unflattened.slots, dict, options.strict);
  const at::NoGradGuard no_grad;
  for (const auto& [slot, value] : plan.loads) {
    const auto& into = unflattened.slots[slot].tensor;
    const auto& flat = unflattened.flat_refs[slot];
    if (!flat.sharded) {
      detail::load_value(into, value, /*assign=*/false);
      continue;
    }
    const auto unsharded = detail::fit_value(value, into);
    const auto& group = flat.group();
    group.layout().copy_to_shard(flat.index, detail::local_or_self(unsharded), group.shard_group()->rank(),
                                 group.flat_param());
  }
  return plan.report;
}

StateDict get_optimizer_state_dict(OptimizerAccess& optimizer, torch::nn::Module& module,
                                   const StateDictOptions& options) {
  fsdp_engine::check_options("get_optimizer_state_dict", options);
  const at::NoGradGuard no_grad;
  const fsdp_engine::UnflattenedParameters unflattened(module);
  fsdp_engine::FlatOptimizer by_name(optimizer, unflattened, {options.full_state_dict, options.cpu_offload});
  by_name.gather();
  const auto dict = detail::optimizer_state_dict(by_name, unflattened.slots, class_name(module));
  return !options.rank0_only || fsdp_engine::is_rank0() ? dict : StateDict();
}

LoadReport set_optimizer_state_dict(OptimizerAccess& optimizer, torch::nn::Module& module, const StateDict& given,
                                    const StateDictOptions& options) {
  const auto dict = fsdp_engine::load_source(given, module, options);
  const at::NoGradGuard no_grad;
  const fsdp_engine::UnflattenedParameters unflattened(module);
  fsdp_engine::FlatOptimizer by_name(optimizer, unflattened, {});
  by_name.check(dict);
  auto report = detail::load_optimizer_state_dict(by_name, unflattened.slots, class_name(module), dict,
                                                  {.strict = options.strict});
  by_name.finish();
  return report;
}

StateDict get_optimizer_state_dict(torch::optim::Optimizer& optimizer, torch::nn::Module& module,
                                   const StateDictOptions& options) {
  return get_optimizer_state_dict(*access_to(optimizer), module, options);
}

LoadReport set_optimizer_state_dict(torch::optim::Optimizer& optimizer, torch::nn::Module& module,
                                    const StateDict& dict, const StateDictOptions& options) {
  return set_optimizer_state_dict(*access_to(optimizer), module, dict, options);
}

}  // namespace tessera
