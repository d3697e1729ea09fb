#include "tessera/data_parallel/fsdp/state_dict.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/comm/world.h"
#include "tessera/data_parallel/fsdp/detail/state/flat_optimizer.h"
#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"
#include "tessera/data_parallel/fsdp/detail/state/unflattened_parameters.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/state/detail/fit_value.h"
#include "tessera/state/detail/plan_load.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <sstream>

namespace tessera {

using namespace data_parallel;
using namespace data_parallel::fsdp;

namespace {

void check(const char* what, const StateDictOptions& options) {
  TESSERA_CHECK(!options.rank0_only || options.full_state_dict, UsageError, what,
                ": rank0_only without full_state_dict: the first rank has only its own pieces; set full_state_dict");
}

bool is_first() { return World::current().rank() == 0; }

// ---- a dict that only the first rank has

std::string describe(const StateDict& dict) {
  std::ostringstream text;
  for (const auto& [name, value] : dict) {
    text << name << ' ' << static_cast<int>(value.scalar_type());
    for (const int64_t size : value.sizes()) text << ' ' << size;
    text << '\n';
  }
  return text.str();
}

at::Tensor made_from(std::istringstream& line, c10::Device device) {
  int dtype = 0;
  line >> dtype;
  std::vector<int64_t> sizes;
  for (int64_t size = 0; line >> size;) sizes.push_back(size);
  return at::empty(sizes, at::TensorOptions(device).dtype(static_cast<c10::ScalarType>(dtype)));
}

StateDict from_first_rank(const StateDict& dict, c10::Device device) {
  const auto group = World::current().group();
  if (group->size() == 1) return dict;
  std::string distributed;
  for (const auto& [name, value] : dict)
    if (is_first() && is_dtensor(value)) distributed = name;
  const auto text = comm::from_first(group, "set_model_state_dict",
                                     is_first() ? distributed.empty() ? describe(dict) : "!" + distributed : "");
  TESSERA_CHECK(text.empty() || text[0] != '!', UsageError, "broadcast_from_rank0: '", text.substr(1),
                "' is distributed, and the first rank has only its piece; give whole tensors (full_state_dict)");
  StateDict received;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    auto value = is_first() ? dict.at(name).detach().to(device).contiguous() : made_from(words, device);
    comm::broadcast_(value, 0, group);
    funcol::wait(value, group);
    received.insert(name, std::move(value));
  }
  return received;
}

c10::Device device_of(const torch::nn::Module& module) {
  for (const auto& sharded : find_all(module))
    if (!sharded->turn->unit->members().empty()) return sharded->turn->unit->device();
  for (const auto& parameter : module.parameters()) return local_value(parameter).device();
  return c10::kCPU;
}

}  // namespace

StateDict get_model_state_dict(torch::nn::Module& module, const StateDictOptions& options) {
  check("get_model_state_dict", options);
  const at::NoGradGuard no_grad;
  const Originals originals(module);
  const Form form{options.full_state_dict, options.cpu_offload};
  const bool wanted = !options.rank0_only || is_first();
  std::unordered_map<const void*, at::Tensor> values;  // of flat members, by handle
  for (const auto& sharded : originals.units) {
    const auto& unit = *sharded->turn->unit;
    const auto gathered = gather_shard(unit, unit.flat());
    for (size_t i = 0; i < unit.members().size(); i++) {
      auto value = form.flat(*sharded, unit.members()[i], whole_in(unit, i, gathered));
      if (wanted) values.emplace(unit.members()[i].handle.unsafeGetTensorImpl(), std::move(value));
    }
  }
  StateDict dict;
  for (size_t s = 0; s < originals.slots.size(); s++) {
    const auto& slot = originals.slots[s];
    if (!originals.flat[s].sharded) {
      auto value = form.plain(slot.tensor);
      if (wanted) dict.insert(slot.name, std::move(value));
    } else if (wanted) {
      dict.insert(slot.name, values.at(originals.flat[s].member().handle.unsafeGetTensorImpl()));
    }
  }
  return dict;
}

LoadReport set_model_state_dict(torch::nn::Module& module, const StateDict& given, const StateDictOptions& options) {
  const auto dict = options.broadcast_from_rank0 ? from_first_rank(given, device_of(module)) : given;
  const Originals originals(module);
  const auto plan = detail::plan_load(module, originals.slots, dict, options.strict);
  const at::NoGradGuard no_grad;
  for (const auto& [slot, value] : plan.loads) {
    const auto& into = originals.slots[slot].tensor;
    const auto& flat = originals.flat[slot];
    if (!flat.sharded) {
      detail::load_value(into, value, /*assign=*/false);
      continue;
    }
    const auto whole = detail::fit_value(value, into);
    const auto& unit = flat.unit();
    unit.layout().put(flat.index, local_value(whole), unit.shards()->rank(), unit.flat());
  }
  return plan.report;
}

StateDict get_optimizer_state_dict(OptimizerAccess& optimizer, torch::nn::Module& module,
                                   const StateDictOptions& options) {
  check("get_optimizer_state_dict", options);
  const at::NoGradGuard no_grad;
  const Originals originals(module);
  const Form form{options.full_state_dict, options.cpu_offload};
  FlatOptimizer by_name(optimizer, originals, form);
  by_name.gather();
  const auto dict = detail::optimizer_state_dict(by_name, originals.slots, class_name(module));
  return !options.rank0_only || is_first() ? dict : StateDict();
}

LoadReport set_optimizer_state_dict(OptimizerAccess& optimizer, torch::nn::Module& module, const StateDict& given,
                                    const StateDictOptions& options) {
  const auto dict = options.broadcast_from_rank0 ? from_first_rank(given, device_of(module)) : given;
  const at::NoGradGuard no_grad;
  const Originals originals(module);
  FlatOptimizer by_name(optimizer, originals, {});
  by_name.check(dict);
  auto report =
      detail::load_optimizer_state_dict(by_name, originals.slots, class_name(module), dict, {.strict = options.strict});
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
