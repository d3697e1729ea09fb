#include "tessera/state/optimizer_state.h"

#include "tessera/base/error.h"
#include "tessera/nn/module_tree.h"
#include "tessera/state/detail/fit_value.h"
#include "tessera/state/detail/module_slots.h"
#include "tessera/state/detail/plan_load.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <unordered_map>

namespace tessera {
namespace {

const std::string kState = "state.", kGroups = "param_groups.";

std::string group_prefix(size_t group) { return c10::str(kGroups, group, "."); }

// The parameters of the optimizer, by their names in the module.
class NamedParameters {
 public:
  NamedParameters(const OptimizerAccess& optimizer, const std::vector<detail::ModuleSlot>& slots,
                  const std::string& where) {
    std::unordered_map<const void*, std::vector<std::string>> names;
    for (const auto& slot : slots) names[slot.tensor.unsafeGetTensorImpl()].push_back(slot.name);
    const auto groups = optimizer.groups();
    for (size_t g = 0; g < groups.size(); g++)
      for (size_t i = 0; i < groups[g].size(); i++) {
        const auto found = names.find(groups[g][i].unsafeGetTensorImpl());
        TESSERA_CHECK(found != names.end(), UsageError, "parameter ", i, " of group ", g, " of this ", optimizer.kind(),
                      ", of sizes ", groups[g][i].sizes(), ", is not in ", where,
                      ": pass the module whose parameters the optimizer was created with");
        if (!by_name_.emplace(found->second.front(), groups[g][i]).second) continue;  // in the groups twice
        first_names_.push_back(found->second.front());
        for (const auto& name : found->second) first_of_.emplace(name, found->second.front());
      }
  }

  const std::vector<std::string>& names() const { return first_names_; }
  const at::Tensor& at(const std::string& first_name) const { return by_name_.at(first_name); }
  // The first name of the parameter that has this name; nullptr for an unknown name.
  const std::string* first_name(const std::string& name) const {
    const auto found = first_of_.find(name);
    return found == first_of_.end() ? nullptr : &found->second;
  }

 private:
  std::vector<std::string> first_names_;
  std::unordered_map<std::string, at::Tensor> by_name_;
  std::unordered_map<std::string, std::string> first_of_;
};

// The values to load, and the names that do not fit.
struct OptimizerLoadPlan {
  std::unordered_map<std::string, StateDict> state;  // the key is the first name of the parameter
  std::vector<StateDict> options;                    // one per group
  LoadReport report;
};

void plan_options(const OptimizerAccess& optimizer, const StateDict& dict, OptimizerLoadPlan& plan) {
  for (size_t g = 0; g < optimizer.groups().size(); g++) {
    plan.options.push_back(optimizer.options(g));
    StateDict found;
    for (const auto& [name, value] : plan.options.back()) {
      const auto full_name = group_prefix(g) + name;
      const at::Tensor* other = dict.find(full_name);
      if (!other)
        plan.report.missing.push_back(full_name);
      else if (other->sizes() != value.sizes())
        plan.report.mismatched.push_back({full_name, value.sizes().vec(), other->sizes().vec()});
      found.insert(name, other && other->sizes() == value.sizes() ? *other : value);
    }
    plan.options.back() = std::move(found);
  }
}

// `full_name` is "state." + the name of the parameter, which may have dots, + "." + the name of the entry.
void plan_entry(const std::vector<OptimizerAccess::StateEntry>& entries, const NamedParameters& parameters,
                const std::string& full_name, const at::Tensor& value, OptimizerLoadPlan& plan) {
  const auto dot = full_name.rfind('.');
  const auto entry_name = full_name.substr(dot + 1);
  const std::string* name =
      dot > kState.size() ? parameters.first_name(full_name.substr(kState.size(), dot - kState.size())) : nullptr;
  const auto entry = std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.name == entry_name; });
  if (!name || entry == entries.end() || plan.state[*name].contains(entry_name)) {
    plan.report.unexpected.push_back(full_name);
    return;
  }
  const at::Tensor& parameter = parameters.at(*name);
  const c10::IntArrayRef expected = entry->like_parameter ? parameter.sizes() : value.sizes();
  if (value.sizes() != expected) plan.report.mismatched.push_back({full_name, expected.vec(), value.sizes().vec()});
  const auto why = entry->like_parameter ? detail::why_no_fit(value, parameter) : "";
  TESSERA_CHECK(why.empty(), UsageError, "load_optimizer_state_dict: '", full_name, "' cannot be loaded: ", why,
                ". Nothing was loaded.");
  plan.state[*name].insert(entry_name, value);
}

OptimizerLoadPlan plan_optimizer_load(const OptimizerAccess& optimizer, const NamedParameters& parameters,
                                      const StateDict& dict) {
  OptimizerLoadPlan plan;
  plan_options(optimizer, dict, plan);
  const auto entries = optimizer.state_entries();
  for (const auto& [name, value] : dict) {
    if (name.starts_with(kState)) {
      plan_entry(entries, parameters, name, value, plan);
      continue;
    }
    bool known = false;
    for (size_t g = 0; g < plan.options.size() && !known; g++)
      known = name.starts_with(group_prefix(g)) && plan.options[g].contains(name.substr(group_prefix(g).size()));
    if (!known) plan.report.unexpected.push_back(name);
  }
  for (const auto& name : parameters.names()) {
    const auto& found = plan.state[name];
    if (found.empty() && !optimizer.has_state_before_first_step()) continue;
    for (const auto& entry : entries)
      if (entry.required && !found.contains(entry.name))
        plan.report.missing.push_back(kState + name + "." + entry.name);
  }
  return plan;
}

bool fits(const std::vector<OptimizerAccess::StateEntry>& entries, const StateDict& found,
          const at::Tensor& parameter) {
  for (const auto& entry : entries) {
    const at::Tensor* value = found.find(entry.name);
    if (!value && entry.required) return false;
    if (value && entry.like_parameter && value->sizes() != parameter.sizes()) return false;
  }
  return true;
}

StateDict fitted(const std::vector<OptimizerAccess::StateEntry>& entries, const StateDict& found,
                 const at::Tensor& parameter, bool assign) {
  StateDict out;
  for (const auto& entry : entries)
    if (const at::Tensor* value = found.find(entry.name)) {
      auto fit = entry.like_parameter ? detail::fit_value(*value, parameter) : value->detach();
      if (entry.like_parameter && !parameter.is_meta()) fit = fit.to(parameter.device());
      out.insert(entry.name, assign ? fit : fit.clone());
    }
  return out;
}

}  // namespace

namespace detail {

StateDict optimizer_state_dict(OptimizerAccess& optimizer, const std::vector<ModuleSlot>& slots,
                               const std::string& where) {
  const NamedParameters parameters(optimizer, slots, where);
  StateDict dict;
  for (const auto& name : parameters.names())
    dict.insert_all(kState + name + ".", optimizer.state(parameters.at(name)));
  for (size_t g = 0; g < optimizer.groups().size(); g++) dict.insert_all(group_prefix(g), optimizer.options(g));
  return dict;
}

LoadReport load_optimizer_state_dict(OptimizerAccess& optimizer, const std::vector<ModuleSlot>& slots,
                                     const std::string& where, const StateDict& dict, LoadOptions options) {
  const NamedParameters parameters(optimizer, slots, where);
  auto plan = plan_optimizer_load(optimizer, parameters, dict);
  TESSERA_CHECK(!options.strict || plan.report.empty(), UsageError,
                "load_optimizer_state_dict: the dict does not fit this ", optimizer.kind(), " of ",
                optimizer.groups().size(), " groups and the parameters of ", where, "; nothing was loaded.\n",
                plan.report, "Pass {.strict = false} to load what fits.");
  for (size_t g = 0; g < plan.options.size(); g++) optimizer.check_options(g, plan.options[g]);
  at::NoGradGuard no_grad;
  const auto entries = optimizer.state_entries();
  for (const auto& name : parameters.names()) {  // in this order on all ranks, because it may communicate
    const auto& parameter = parameters.at(name);
    const auto& found = plan.state[name];
    if (!found.empty() && fits(entries, found, parameter))
      optimizer.set_state(parameter, fitted(entries, found, parameter, options.assign));
    else if (found.empty() && options.strict)
      optimizer.set_state(parameter, {});
  }
  for (size_t g = 0; g < plan.options.size(); g++) optimizer.set_options(g, plan.options[g]);
  return plan.report;
}

}  // namespace detail

StateDict optimizer_state_dict(OptimizerAccess& optimizer, const torch::nn::Module& module) {
  return detail::optimizer_state_dict(optimizer, detail::slots_of(module), class_name(module));
}

LoadReport load_optimizer_state_dict(OptimizerAccess& optimizer, const torch::nn::Module& module, const StateDict& dict,
                                     LoadOptions options) {
  return detail::load_optimizer_state_dict(optimizer, detail::slots_of(module), class_name(module), dict, options);
}

StateDict optimizer_state_dict(torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  return optimizer_state_dict(*access_to(optimizer), module);
}

LoadReport load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
                                     const StateDict& dict, LoadOptions options) {
  return load_optimizer_state_dict(*access_to(optimizer), module, dict, options);
}

}  // namespace tessera
