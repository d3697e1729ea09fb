#include "tessera/data_parallel/fsdp/detail/state/flat_optimizer.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <unordered_set>

namespace tessera::data_parallel::fsdp {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

const OptimizerAccess::Row* row_called(const std::vector<OptimizerAccess::Row>& rows, const std::string& name) {
  for (const auto& row : rows)
    if (row.name == name) return &row;
  return nullptr;
}

}  // namespace

FlatOptimizer::FlatOptimizer(OptimizerAccess& optimizer, const Originals& originals, Form form)
    : optimizer_(optimizer), form_(form), originals_(originals) {
  std::unordered_set<const void*> known;
  for (const auto& group : optimizer.groups())
    for (const auto& parameter : group) known.insert(parameter.unsafeGetTensorImpl());
  for (size_t u = 0; u < originals.units.size(); u++) {
    Part part{originals.units[u], &originals.stand_ins[u], {}, {}};
    const auto& unit = part.unit();
    part.gathered.resize(unit.members().size());
    bool any = false;
    for (size_t i = 0; i < unit.members().size(); i++) {
      const auto* own = (part.is_one() ? unit.flat() : unit.members()[i].handle).unsafeGetTensorImpl();
      if (!known.count(own)) continue;
      any = true;
      const Place place{parts_.size(), i};
      places_.emplace((*part.stand_ins)[i].unsafeGetTensorImpl(), place);
      inside_[own].push_back(place);
    }
    if (any) parts_.push_back(std::move(part));
  }
}

std::vector<std::vector<at::Tensor>> FlatOptimizer::groups() const {
  std::vector<std::vector<at::Tensor>> all;
  for (const auto& group : optimizer_.groups()) {
    all.emplace_back();
    for (const auto& parameter : group) {
      const auto found = inside_.find(parameter.unsafeGetTensorImpl());
      if (found == inside_.end()) {
        all.back().push_back(parameter);
        continue;
      }
      for (const auto& [part, member] : found->second) all.back().push_back((*parts_[part].stand_ins)[member]);
    }
  }
  return all;
}

StateDict FlatOptimizer::options(size_t group) const { return optimizer_.options(group); }

// ---- saving

void FlatOptimizer::gather() {
  for (auto& part : parts_) part.is_one() ? gather_flat(part) : gather_pieces(part);
}

void FlatOptimizer::gather_flat(Part& part) const {
  const auto& unit = part.unit();
  const auto described = rows();
  for (const auto& [name, row] : optimizer_.state(unit.flat())) {
    const auto* about = row_called(described, name);
    const auto gathered = about && about->like_parameter ? gather_shard(unit, row) : at::Tensor();
    for (size_t i = 0; i < unit.members().size(); i++)
      part.gathered[i].insert(name, gathered.defined()
                                        ? form_.flat(*part.sharded, unit.members()[i], whole_in(unit, i, gathered))
                                        : form_.plain(row));
  }
}

// A rank that has no part of a parameter has no state for it: which rows there are, of which dtype, and the numbers
// among them, are first made known to all.
void FlatOptimizer::gather_pieces(Part& part) const {
  const auto& unit = part.unit();
  const auto described = rows();
  const auto n = static_cast<int64_t>(unit.members().size()), columns = static_cast<int64_t>(described.size());
  std::vector<StateDict> own(static_cast<size_t>(n));
  auto table = at::full({n, columns}, kNone, at::kDouble);
  auto cells = table.accessor<double, 2>();
  for (int64_t i = 0; i < n; i++) {
    const auto at = static_cast<size_t>(i);
    if (!inside_.count(unit.members()[at].handle.unsafeGetTensorImpl())) continue;
    own[at] = optimizer_.state(unit.members()[at].handle);
    for (int64_t c = 0; c < columns; c++)
      if (const auto* row = own[at].find(described[static_cast<size_t>(c)].name))
        cells[i][c] = described[static_cast<size_t>(c)].like_parameter ? static_cast<double>(row->scalar_type())
                                                                       : row->item<double>();
  }
  table = largest_of_all_ranks(unit, table);
  const auto all = table.accessor<double, 2>();
  for (int64_t c = 0; c < columns; c++) {
    const auto& about = described[static_cast<size_t>(c)];
    Tensors pieces;
    double dtype = kNone;
    for (int64_t i = 0; i < n; i++) {
      const auto* row = own[static_cast<size_t>(i)].find(about.name);
      pieces.push_back(row ? *row : at::Tensor());
      dtype = std::max(dtype, all[i][c]);
    }
    if (dtype == kNone) continue;
    at::Tensor gathered;
    if (about.like_parameter)
      gathered =
          gather_shard(unit, shard_of_pieces(unit, pieces, static_cast<c10::ScalarType>(static_cast<int8_t>(dtype))));
    for (int64_t i = 0; i < n; i++) {
      const auto at = static_cast<size_t>(i);
      if (all[i][c] == kNone) continue;
      if (about.like_parameter)
        part.gathered[at].insert(about.name,
                                 form_.flat(*part.sharded, unit.members()[at], whole_in(unit, at, gathered)));
      else
        part.gathered[at].insert(
            about.name, pieces[at].defined() ? form_.plain(pieces[at]) : at::scalar_tensor(all[i][c], at::kFloat));
    }
  }
}

StateDict FlatOptimizer::state(const at::Tensor& parameter) const {
  const auto found = places_.find(parameter.unsafeGetTensorImpl());
  if (found != places_.end()) return parts_[found->second.part].gathered[found->second.member];
  StateDict made;
  for (const auto& [name, row] : optimizer_.state(parameter)) made.insert(name, form_.plain(row));
  return made;
}

// ---- loading

void FlatOptimizer::check(const StateDict& dict) const {
  for (const auto& part : parts_) {
    if (!part.is_one()) continue;
    for (const auto& row : rows()) {
      if (row.like_parameter) continue;
      std::string first;
      const at::Tensor* number = nullptr;
      for (size_t s = 0; s < originals_.slots.size(); s++) {
        if (originals_.flat[s].sharded != part.sharded) continue;
        const auto name = c10::str("state.", originals_.slots[s].name, ".", row.name);
        const auto* found = dict.find(name);
        if (!found || found->numel() != 1) continue;
        TESSERA_CHECK(!number || found->item<double>() == number->item<double>(), UsageError,
                      "set_optimizer_state_dict: ", name, " is ", found->item<double>(), " and ", first, " is ",
                      number ? number->item<double>() : 0, ", but both are parts of one flat parameter, that of ",
                      part.unit().name(), "; wrap with use_orig_params to load this. Nothing was loaded.");
        if (!number) first = name, number = found;
      }
    }
  }
}

void FlatOptimizer::set_state(const at::Tensor& parameter, StateDict rows) {
  const auto found = places_.find(parameter.unsafeGetTensorImpl());
  if (found == places_.end()) return optimizer_.set_state(parameter, std::move(rows));
  auto& part = parts_[found->second.part];
  part.is_one() ? set_flat(part, found->second.member, rows) : set_pieces(part, found->second.member, rows);
}

void FlatOptimizer::set_flat(Part& part, size_t member, const StateDict& rows) {
  const auto& unit = part.unit();
  part.touched = true;
  const auto described = this->rows();
  for (const auto& [name, value] : rows) {
    const auto* about = row_called(described, name);
    if (!about || !about->like_parameter) {
      if (!part.loaded.contains(name)) part.loaded.insert(name, value);
      continue;
    }
    if (!part.loaded.contains(name))
      part.loaded.insert(name, at::zeros_like(unit.flat(), value.scalar_type()).requires_grad_(false));
    unit.layout().put(member, local_value(value), unit.shards()->rank(), part.loaded.at(name));
  }
}

void FlatOptimizer::set_pieces(const Part& part, size_t member, const StateDict& rows) {
  const auto& unit = part.unit();
  const auto& handle = unit.members()[member].handle;
  const auto rank = unit.shards()->rank();
  StateDict pieces;
  const auto described = this->rows();
  // A rank without a part of it never makes a step with it.
  const bool here = unit.layout().in_shard(member, rank).size > 0;
  for (const auto& [name, value] : rows) {
    if (!here) break;
    const auto* about = row_called(described, name);
    if (!about || !about->like_parameter) {
      pieces.insert(name, value);
      continue;
    }
    auto piece = unit.layout().cut(member, local_value(value), rank).to(unit.flat().device()).clone();
    piece = piece.view(unit.layout().piece_sizes(member, rank));
    pieces.insert(name, is_dtensor(handle) ? as_whole(unit.members()[member], piece) : piece);
  }
  optimizer_.set_state(handle, std::move(pieces));
}

void FlatOptimizer::finish() {
  for (auto& part : parts_)
    if (part.is_one() && part.touched) optimizer_.set_state(part.unit().flat(), std::move(part.loaded));
}

}  // namespace tessera::data_parallel::fsdp
