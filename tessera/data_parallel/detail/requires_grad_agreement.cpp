#include "tessera/data_parallel/detail/requires_grad_agreement.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string_view>

namespace tessera::data_parallel {
namespace {

constexpr size_t kLabelLength = 40;  // of the name that other ranks see

// Of the indices of frozen parameters; 0 if nothing is frozen.
int32_t hash_of_frozen(const std::vector<bool>& requires_grad) {
  uint64_t hash = 0;
  for (size_t i = 0; i < requires_grad.size(); i++)
    if (!requires_grad[i]) hash = (hash ^ (i + 1)) * 0x9e3779b97f4a7c15, hash ^= hash >> 29;
  return static_cast<int32_t>(hash);
}

std::vector<bool> pattern_of(const NamedTensors& parameters) {
  std::vector<bool> requires_grad;
  requires_grad.reserve(parameters.size());
  for (const auto& parameter : parameters) requires_grad.push_back(parameter.value.requires_grad());
  return requires_grad;
}

bool has_no_peers(const comm::Group& group) {
  return group->size() == 1 || group->backend_name() == std::string_view("fake");
}

}  // namespace

RequiresGradHash::RequiresGradHash(const std::vector<bool>& requires_grad) : hash_(hash_of_frozen(requires_grad)) {
  const auto frozen = std::count(requires_grad.begin(), requires_grad.end(), false);
  if (frozen > 0) text_ = ", " + std::to_string(frozen) + " frozen";
}

void RequiresGradAgreement::start(const NamedTensors& parameters) { agreed_ = pattern_of(parameters); }

void RequiresGradAgreement::check(const std::string& what, const NamedTensors& parameters,
                                  const std::vector<comm::Group>& groups) {
  auto now = pattern_of(parameters);
  if (now == agreed_) return;
  const OpModesOff not_recorded;  // not part of a compiled step
  size_t first = 0;
  while (first < agreed_.size() && now[first] == agreed_[first]) first++;
  const auto change = now[first] ? " was unfrozen" : " was frozen";
  auto name = parameters[first].name;
  if (name.size() > kLabelLength - 14) name = "..." + name.substr(name.size() - (kLabelLength - 17));
  const auto text = name + change;
  for (const auto& group : groups) {
    if (has_no_peers(group)) continue;
    if (!local_or_self(parameters[first].value).device().is_cpu()) {  // collectives of a device are not compared
      std::vector<std::string> lines;
      for (size_t i = 0; i < parameters.size(); i++) lines.push_back(parameters[i].name + (now[i] ? "" : " frozen"));
      comm::require_same_on_all_ranks(group, what, lines);
      continue;
    }
    const comm::CollectiveLabel label(text.c_str(), hash_of_frozen(now));
    auto nothing = at::zeros({1}, at::kInt);
    try {
      group->all_reduce(nothing, ReduceOp::Sum).wait();
    } catch (const CommError& error) {
      TESSERA_FAIL(CommError, what, ": parameter ", parameters[first].name, change,
                   " on this rank. Freeze and unfreeze the same parameters on all ranks, before the same forward. ",
                   error.what_without_backtrace());
    }
  }
  agreed_ = std::move(now);
}

GradHookHandle register_hook_on_any_leaf(const at::Tensor& leaf,
                                         const std::function<GradHookHandle(const at::Tensor&)>& registered) {
  if (!at::isFloatingType(leaf.scalar_type()) && !at::isComplexType(leaf.scalar_type())) return {};
  const bool frozen = !leaf.requires_grad();
  if (frozen) leaf.requires_grad_(true);
  auto handle = registered(leaf);
  if (frozen) leaf.requires_grad_(false);
  return handle;
}

}  // namespace tessera::data_parallel
