#include "tessera/state/load_state_dict.h"

#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/nn/module_tree.h"
#include "tessera/state/detail/fit_value.h"
#include "tessera/state/detail/module_slots.h"
#include "tessera/state/detail/plan_load.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_has_compatible_shallow_copy_type.h>

#include <ostream>
#include <sstream>
#include <unordered_set>

namespace tessera {
namespace {

using detail::LoadPlan;
using detail::ModuleSlot;

LoadPlan plan_module_load(const std::vector<ModuleSlot>& slots, const StateDict& dict) {
  LoadPlan plan;
  std::unordered_set<std::string> known;
  for (size_t i = 0; i < slots.size(); i++) {
    const auto& slot = slots[i];
    known.insert(slot.name);
    const at::Tensor* value = dict.find(slot.name);
    if (!value) {
      plan.report.missing.push_back(slot.name);
    } else if (value->sizes() != slot.tensor.sizes()) {
      plan.report.mismatched.push_back({slot.name, slot.tensor.sizes().vec(), value->sizes().vec()});
    } else {
      const auto why = detail::why_no_fit(*value, slot.tensor);
      TESSERA_CHECK(why.empty(), UsageError, "load_state_dict: '", slot.name, "' of ", class_name(*slot.owner),
                    " cannot be loaded: ", why, ". Nothing was loaded.");
      plan.loads.push_back({i, *value});
    }
  }
  for (const auto& [name, value] : dict)
    if (!known.count(name)) plan.report.unexpected.push_back(name);
  return plan;
}

// Replaces the data of a tensor for all handles to it.
void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  // set_data does not allow a change from meta to another device. This check is its only reason.
  if (at::_has_compatible_shallow_copy_type(tensor, data))
    tensor.set_data(data);
  else
    tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

std::string explain(const torch::nn::Module& module, const std::vector<ModuleSlot>& slots, const LoadReport& report) {
  std::vector<std::string> names;
  for (const auto& slot : slots) names.push_back(slot.name);
  std::ostringstream text;
  text << "load_state_dict: the dict does not fit " << class_name(module) << "; nothing was loaded.";
  for (const auto& name : report.missing) text << "\n  missing from the dict: " << name;
  size_t suggestions = 20;  // a limit, because each one searches all names
  for (const auto& name : report.unexpected) {
    text << "\n  the module has no " << name;
    if (suggestions == 0) continue;
    suggestions--;
    const auto near = did_you_mean(name, report.missing.empty() ? names : report.missing);
    text << (near.empty() ? "" : "; ") << near;
  }
  for (const auto& wrong : report.mismatched)
    for (const auto& slot : slots)
      if (slot.name == wrong.name)
        text << "\n  wrong shape: " << wrong.name << " of " << class_name(*slot.owner) << " is "
             << c10::IntArrayRef(wrong.expected) << " in the module and " << c10::IntArrayRef(wrong.found)
             << " in the dict";
  text << "\nPass {.strict = false} to load what fits.";
  return text.str();
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const LoadReport& report) {
  for (const auto& name : report.missing) out << "missing " << name << '\n';
  for (const auto& name : report.unexpected) out << "unexpected " << name << '\n';
  for (const auto& wrong : report.mismatched)
    out << "mismatched " << wrong.name << " expected " << c10::IntArrayRef(wrong.expected) << " found "
        << c10::IntArrayRef(wrong.found) << '\n';
  return out;
}

namespace detail {

LoadPlan plan_load(const torch::nn::Module& module, const std::vector<ModuleSlot>& slots, const StateDict& dict,
                   bool strict) {
  auto plan = plan_module_load(slots, dict);
  TESSERA_CHECK(!strict || plan.report.empty(), UsageError, explain(module, slots, plan.report));
  return plan;
}

void load_value(const at::Tensor& into, const at::Tensor& value, bool assign) {
  const auto fit = fit_value(value, into);
  if (assign)
    replace_data(into, fit);
  else if (into.is_meta())  // a copy: training must not change the dict
    replace_data(into, fit.to(into.scalar_type(), /*non_blocking=*/false, /*copy=*/true));
  else
    into.copy_(fit);
}

}  // namespace detail

LoadReport load_state_dict(torch::nn::Module& module, const StateDict& dict, LoadOptions options) {
  const auto slots = detail::slots_of(module);
  const auto plan = detail::plan_load(module, slots, dict, options.strict);
  at::NoGradGuard no_grad;
  for (const auto& load : plan.loads) detail::load_value(slots[load.slot].tensor, load.value, options.assign);
  return plan.report;
}

}  // namespace tessera
