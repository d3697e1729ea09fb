#include "tessera/data_parallel/fsdp/detail/state/flat_optimizer.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <unordered_set>

namespace tessera::data_parallel::fsdp {
namespace {

constexpr double kMissing = -std::numeric_limits<double>::infinity();

// True if the state entry has the shape of the parameter (a moment), false if it is a scalar (step).
bool is_like_parameter(const std::vector<OptimizerAccess::StateEntry>& entries, const std::string& name) {
  for (const auto& entry : entries)
    if (entry.name == name) return entry.like_parameter;
  return false;
}

}  // namespace

FlatOptimizer::FlatOptimizer(OptimizerAccess& optimizer, const UnflattenedParameters& unflattened, StateDictForm form)
    : optimizer_(optimizer), form_(form), unflattened_(unflattened) {
  std::unordered_set<const void*> optimized;
  for (const auto& group : optimizer.groups())
    for (const auto& parameter : group) optimized.insert(parameter.unsafeGetTensorImpl());
  for (size_t m = 0; m < unflattened.flat_modules.size(); m++) {
    FlatGroup flat_group{unflattened.flat_modules[m], &unflattened.meta_params[m], {}, {}};
    const auto& group = flat_group.group();
    flat_group.gathered.resize(group.params().size());
    bool any = false;
    for (size_t i = 0; i < group.params().size(); i++) {
      const auto& parameter = flat_group.has_flat_parameter() ? group.flat_param() : group.params()[i].tensor;
      if (!optimized.count(parameter.unsafeGetTensorImpl())) continue;
      any = true;
      const ParamIndex index{flat_groups_.size(), i};
      by_meta_param_.emplace((*flat_group.meta_params)[i].unsafeGetTensorImpl(), index);
      by_optimizer_param_[parameter.unsafeGetTensorImpl()].push_back(index);
    }
    if (any) flat_groups_.push_back(std::move(flat_group));
  }
}

std::vector<std::vector<at::Tensor>> FlatOptimizer::groups() const {
  std::vector<std::vector<at::Tensor>> all;
  for (const auto& group : optimizer_.groups()) {
    all.emplace_back();
    for (const auto& parameter : group) {
      const auto found = by_optimizer_param_.find(parameter.unsafeGetTensorImpl());
      if (found == by_optimizer_param_.end()) {
        all.back().push_back(parameter);
        continue;
      }
      for (const auto& index : found->second)
        all.back().push_back((*flat_groups_[index.flat_group].meta_params)[index.param]);
    }
  }
  return all;
}

StateDict FlatOptimizer::options(size_t group) const { return optimizer_.options(group); }

// ---- saving

void FlatOptimizer::gather() {
  for (auto& flat_group : flat_groups_)
    flat_group.has_flat_parameter() ? gather_flat(flat_group) : gather_local_shards(flat_group);
}

void FlatOptimizer::gather_flat(FlatGroup& flat_group) const {
  const auto& group = flat_group.group();
  const auto entries = state_entries();
  for (const auto& [name, value] : optimizer_.state(group.flat_param())) {
    const auto gathered = is_like_parameter(entries, name) ? gather_shard(group, value) : at::Tensor();
    for (size_t i = 0; i < group.params().size(); i++)
      flat_group.gathered[i].insert(
          name, gathered.defined()
                    ? form_.convert_flat(*flat_group.sharded, group.params()[i], param_in_gathered(group, i, gathered))
                    : form_.convert(value));
  }
}

// A rank whose shard has no element of a parameter has no state for it. So the ranks first exchange a table: which
// entries exist, their dtypes, and the values of scalars.
void FlatOptimizer::gather_local_shards(FlatGroup& flat_group) const {
  const auto& group = flat_group.group();
  const auto entries = state_entries();
  const auto n = static_cast<int64_t>(group.params().size()), columns = static_cast<int64_t>(entries.size());
  std::vector<StateDict> local(static_cast<size_t>(n));
  auto table = at::full({n, columns}, kMissing, at::kDouble);
  auto cells = table.accessor<double, 2>();
  for (int64_t i = 0; i < n; i++) {
    const auto at = static_cast<size_t>(i);
    if (!by_optimizer_param_.count(group.params()[at].tensor.unsafeGetTensorImpl())) continue;
    local[at] = optimizer_.state(group.params()[at].tensor);
    for (int64_t c = 0; c < columns; c++) {
      const auto& entry = entries[static_cast<size_t>(c)];
      if (const auto* value = local[at].find(entry.name))
        cells[i][c] = entry.like_parameter ? static_cast<double>(value->scalar_type()) : value->item<double>();
    }
  }
  table = max_over_ranks(group, table);
  const auto all = table.accessor<double, 2>();
  for (int64_t c = 0; c < columns; c++) {
    const auto& entry = entries[static_cast<size_t>(c)];
    Tensors values;
    double dtype = kMissing;
    for (int64_t i = 0; i < n; i++) {
      const auto* value = local[static_cast<size_t>(i)].find(entry.name);
      values.push_back(value ? *value : at::Tensor());
      dtype = std::max(dtype, all[i][c]);
    }
    if (dtype == kMissing) continue;
    at::Tensor gathered;
    if (entry.like_parameter)
      gathered =
          gather_shard(group, make_shard(group, values, static_cast<c10::ScalarType>(static_cast<int8_t>(dtype))));
    for (int64_t i = 0; i < n; i++) {
      const auto at = static_cast<size_t>(i);
      if (all[i][c] == kMissing) continue;
      auto& state = flat_group.gathered[at];
      if (entry.like_parameter)
        state.insert(entry.name, form_.convert_flat(*flat_group.sharded, group.params()[at],
                                                    param_in_gathered(group, at, gathered)));
      else
        state.insert(entry.name,
                     values[at].defined() ? form_.convert(values[at]) : at::scalar_tensor(all[i][c], at::kFloat));
    }
  }
}

StateDict FlatOptimizer::state(const at::Tensor& parameter) const {
  const auto found = by_meta_param_.find(parameter.unsafeGetTensorImpl());
  if (found != by_meta_param_.end()) return flat_groups_[found->second.flat_group].gathered[found->second.param];
  StateDict converted;
  for (const auto& [name, value] : optimizer_.state(parameter)) converted.insert(name, form_.convert(value));
  return converted;
}

// ---- loading

void FlatOptimizer::check(const StateDict& dict) const {
  for (const auto& flat_group : flat_groups_) {
    if (!flat_group.has_flat_parameter()) continue;
    for (const auto& entry : state_entries()) {
      if (entry.like_parameter) continue;
      std::string first_name;
      const at::Tensor* first = nullptr;
      for (size_t s = 0; s < unflattened_.slots.size(); s++) {
        if (unflattened_.flat_refs[s].sharded != flat_group.sharded) continue;
        const auto name = c10::str("state.", unflattened_.slots[s].name, ".", entry.name);
        const auto* found = dict.find(name);
        if (!found || found->numel() != 1) continue;
        TESSERA_CHECK(!first || found->item<double>() == first->item<double>(), UsageError,
                      "set_optimizer_state_dict: ", name, " is ", found->item<double>(), " and ", first_name, " is ",
                      first ? first->item<double>() : 0, ", but both are parts of one flat parameter, that of ",
                      flat_group.group().name(), "; wrap with use_orig_params to load this. Nothing was loaded.");
        if (!first) first_name = name, first = found;
      }
    }
  }
}

void FlatOptimizer::set_state(const at::Tensor& parameter, StateDict state) {
  const auto found = by_meta_param_.find(parameter.unsafeGetTensorImpl());
  if (found == by_meta_param_.end()) return optimizer_.set_state(parameter, std::move(state));
  auto& flat_group = flat_groups_[found->second.flat_group];
  const auto param = found->second.param;
  flat_group.has_flat_parameter() ? set_flat(flat_group, param, state) : set_local_shards(flat_group, param, state);
}

void FlatOptimizer::set_flat(FlatGroup& flat_group, size_t param, const StateDict& state) {
  const auto& group = flat_group.group();
  flat_group.has_loaded = true;
  const auto entries = state_entries();
  for (const auto& [name, value] : state) {
    auto& loaded = flat_group.loaded;
    if (!is_like_parameter(entries, name)) {
      if (!loaded.contains(name)) loaded.insert(name, value);
      continue;
    }
    if (!loaded.contains(name))
      loaded.insert(name, at::zeros_like(group.flat_param(), value.scalar_type()).requires_grad_(false));
    group.layout().copy_to_shard(param, local_or_self(value), group.shard_group()->rank(), loaded.at(name));
  }
}

void FlatOptimizer::set_local_shards(const FlatGroup& flat_group, size_t param, const StateDict& state) {
  const auto& group = flat_group.group();
  const auto& tensor = group.params()[param].tensor;
  const auto rank = group.shard_group()->rank();
  StateDict local;
  const auto entries = state_entries();
  // If this rank has no element of the parameter, its optimizer never creates state for it.
  const bool is_local = group.layout().range_in_shard(param, rank).size > 0;
  for (const auto& [name, value] : state) {
    if (!is_local) break;
    if (!is_like_parameter(entries, name)) {
      local.insert(name, value);
      continue;
    }
    auto shard = group.layout().shard_of(param, local_or_self(value), rank).to(group.flat_param().device()).clone();
    shard = shard.view(group.layout().param_shard_sizes(param, rank));
    local.insert(name, is_dtensor(tensor) ? wrap_unsharded(group.params()[param], shard) : shard);
  }
  optimizer_.set_state(tensor, std::move(local));
}

void FlatOptimizer::finish() {
  for (auto& flat_group : flat_groups_)
    if (flat_group.has_flat_parameter() && flat_group.has_loaded)
      optimizer_.set_state(flat_group.group().flat_param(), std::move(flat_group.loaded));
}

}  // namespace tessera::data_parallel::fsdp
