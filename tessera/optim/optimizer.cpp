#include "tessera/optim/optimizer.h"

#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/base/error.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <unordered_set>

namespace tessera::optim {

using detail::local_or_self;

std::string Optimizer::name_of(size_t group, size_t index, const at::Tensor& parameter) const {
  return c10::str(kind(), ": parameter ", index, " of group ", group,
                  parameter.defined() ? c10::str(", ", parameter.scalar_type(), parameter.sizes(), ",") : "");
}

void Optimizer::add_group(const Tensors& params) {
  const size_t g = groups_.size();
  TESSERA_CHECK(!params.empty(), UsageError, kind(), ": group ", g, " has no parameters");
  std::unordered_set<const void*> seen;
  for (size_t i = 0; i < params.size(); i++) {
    const auto& p = params[i];
    TESSERA_CHECK(p.defined(), UsageError, name_of(g, i, p), " is undefined");
    TESSERA_CHECK(p.is_leaf(), UsageError, name_of(g, i, p),
                  " is no leaf: it was computed from others, and gets no gradient of its own. Give those others");
    TESSERA_CHECK(at::isFloatingType(p.scalar_type()), UsageError, name_of(g, i, p), " is not of a floating dtype");
    TESSERA_CHECK(seen.insert(p.unsafeGetTensorImpl()).second, UsageError, name_of(g, i, p),
                  " is in this group twice: it would be updated twice in a step");
    const auto found = places_.find(p.unsafeGetTensorImpl());
    TESSERA_CHECK(found == places_.end(), UsageError, name_of(g, i, p), " is already parameter ", found->second.index,
                  " of group ", found->second.group, ": it would be updated twice in a step");
  }
  groups_.emplace_back();
  initial_lr_.emplace_back();
  for (size_t i = 0; i < params.size(); i++) {
    groups_[g].push_back({params[i], {}});
    places_.emplace(params[i].unsafeGetTensorImpl(), Place{g, i});
  }
}

void Optimizer::zero_grad(bool set_to_none) {
  for (auto& group : groups_)
    for (auto& slot : group) {
      auto& gradient = slot.parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none)
        gradient.reset();
      else
        gradient.detach_().zero_();
    }
}

Tensors Optimizer::parameters() const {
  Tensors all;
  for (const auto& group : groups_)
    for (const auto& slot : group) all.push_back(slot.parameter);
  return all;
}

double Optimizer::initial_lr(size_t group) {
  auto& initial = initial_lr_.at(group);
  if (!initial) initial = lr(group);
  return *initial;
}

at::Device Optimizer::step_device(size_t, const at::Tensor&) const { return at::kCPU; }

at::Tensor Optimizer::row_like(const at::Tensor& parameter, bool zeroed) {
  const auto& piece = local_or_self(parameter);
  auto row = zeroed ? at::zeros_like(piece) : at::empty_like(piece);
  return is_dtensor(parameter) ? tessera::detail::wrap(row, tessera::detail::meta_of(parameter).spec) : row;
}

// ---- a step

void Optimizer::check_gradient(size_t group, size_t index, const std::vector<Row>& described) {
  auto& slot = groups_[group][index];
  const auto &p = slot.parameter, &gradient = p.grad();
  const auto *spec = tessera::detail::spec_or_null(p), *of_gradient = tessera::detail::spec_or_null(gradient);
  if (spec && spec == of_gradient && spec == slot.fits.get()) return;  // as in the last step
  const auto name = [&] { return name_of(group, index, p); };
  TESSERA_CHECK(gradient.layout() == at::kStrided, UsageError, name(), " has a gradient that is ", gradient.layout(),
                "; only dense ones are taken: call to_dense() on it");
  TESSERA_CHECK(gradient.sizes() == p.sizes() && gradient.scalar_type() == p.scalar_type(), UsageError, name(),
                " has a gradient ", gradient.scalar_type(), gradient.sizes());
  TESSERA_CHECK(is_dtensor(p) == is_dtensor(gradient), UsageError, name(), " is ",
                is_dtensor(p) ? "distributed, but its gradient is plain" : "plain, but its gradient is distributed",
                ": both must be one or the other");
  TESSERA_CHECK(!is_fused(group) || local_or_self(p).is_non_overlapping_and_dense(), UsageError, name(),
                " lies in memory with gaps (strides ", local_or_self(p).strides(),
                "), which fused kernels do not take: make it contiguous, or leave fused off");
  if (spec) {
    TESSERA_CHECK(!spec->has_partial(), ShardingError, name(), " lies as ", to_string(spec->placements),
                  ": a sum that is not yet taken cannot be updated element by element; redistribute it first");
    TESSERA_CHECK(spec == of_gradient || spec->mesh == of_gradient->mesh, UsageError, name(), " lies on mesh(",
                  spec->mesh, "), its gradient on mesh(", of_gradient->mesh, ")");
  }
  for (size_t r = 0; r < slot.rows.size(); r++)
    TESSERA_CHECK(!described[r].like_parameter || detail::same_placement(slot.rows[r], p), UsageError, name(),
                  " was laid out anew after its first step, and its ", described[r].name,
                  " was not: distribute before the first step, or save the state before and load it after");
  if (spec) slot.fits = tessera::detail::meta_of(p).spec;
}

std::vector<std::vector<Optimizer::Job>> Optimizer::plan() {
  const auto described = rows();
  std::vector<std::vector<Job>> jobs(groups_.size());
  for (size_t g = 0; g < groups_.size(); g++) {
    jobs[g].reserve(groups_[g].size());
    for (size_t i = 0; i < groups_[g].size(); i++) {
      auto& slot = groups_[g][i];
      const auto& gradient = slot.parameter.grad();
      if (!gradient.defined()) continue;
      check_gradient(g, i, described);
      const bool lies_right = detail::same_placement(gradient, slot.parameter);
      jobs[g].push_back({&slot, &gradient, &local_or_self(slot.parameter), lies_right ? &local_or_self(gradient) : nullptr});
    }
  }
  return jobs;
}

void Optimizer::lay_out_gradients(std::vector<std::vector<Job>>& jobs) {
  std::vector<Job*> moving;
  for (auto& group : jobs)
    for (auto& job : group)
      if (!job.gradient_piece) moving.push_back(&job);
  for (Job* job : moving) job->laid_out = detail::redistribute_like(*job->gradient, job->slot->parameter);
  for (Job* job : moving) {  // all are started before the first is waited for
    job->gradient = &job->laid_out;
    job->gradient_piece = &local_or_self(job->laid_out);
  }
}

bool Optimizer::takes_scaling(size_t group) const {
  return is_fused(group) || std::all_of(groups_[group].begin(), groups_[group].end(), [](const auto& slot) {
           const auto& piece = local_or_self(slot.parameter);
           return piece.is_cpu() && piece.is_non_overlapping_and_dense();
         });
}

// Rows that a step makes while it is compiled are those of the program: they are there once it has run.
void Optimizer::keep_new_rows_for_runs() {
  for (auto& group : groups_)
    for (auto& slot : group) {
      if (!slot.rows.empty()) continue;
      CompilingScope::on_trace_end([this, &slot](bool finished) {
        const auto rows = std::exchange(slot.rows, {}), pieces = std::exchange(slot.pieces, {});
        if (!finished || rows.empty()) return;
        CompilingScope::on_replay([this, &slot, rows, pieces] {
          slot.rows = rows;
          slot.pieces = pieces;
          changed();
        });
      });
    }
}

void Optimizer::step(const Scaling* scaling) {
  const at::NoGradGuard no_grad;
  if (compiling()) {
    CompilingScope::before_optimizer_step();
    CompilingScope::add_guard([this] { return static_cast<int64_t>(generation_); });
    keep_new_rows_for_runs();
  }
  for (size_t g = 0; scaling && g < groups_.size(); g++)
    TESSERA_CHECK(takes_scaling(g), UsageError, kind(), ": group ", g,
                  " is not fused: it takes gradients that are already unscaled, as GradScaler::unscale_ leaves them");
  auto jobs = plan();
  lay_out_gradients(jobs);
  for (size_t g = 0; g < jobs.size(); g++) {
    const size_t columns = rows_used(g);
    std::vector<const Job*> parts[2];  // those whose first step this is, apart
    for (auto& part : parts) part.reserve(jobs[g].size());
    for (auto& job : jobs[g]) {
      auto& slot = *job.slot;
      job.first = slot.rows.empty();
      if (slot.rows.size() < columns) {
        complete_rows(g, slot.parameter, slot.rows);
        slot.pieces = detail::local_tensors_of(slot.rows);
        changed();
      }
      parts[job.first].push_back(&job);
    }
    for (const auto& part : parts)
      if (!part.empty()) run(g, part, scaling);
  }
}

void Optimizer::run(size_t group, const std::vector<const Job*>& jobs, const Scaling* scaling) {
  const bool fused = is_fused(group) || scaling;
  const size_t columns = rows_used(group);
  const auto piece = [&](size_t i) -> const at::Tensor& { return *jobs[i]->piece; };
  for (const auto& indices : detail::by_device_and_dtype(jobs.size(), piece)) {
    Bundle bundle;
    bundle.first = jobs[indices[0]]->first;
    bundle.parameters.reserve(indices.size());
    bundle.gradients.reserve(indices.size());
    bundle.rows.resize(columns);
    for (auto& column : bundle.rows) column.reserve(indices.size());
    for (const size_t i : indices) {
      const Job& job = *jobs[i];
      bundle.parameters.push_back(*job.piece);
      // Fused kernels on the CPU walk all tensors as one row of memory.
      if (fused && job.gradient_piece->strides() != job.piece->strides())
        bundle.gradients.push_back(at::empty_like(*job.piece).copy_(*job.gradient_piece));
      else
        bundle.gradients.push_back(*job.gradient_piece);
      for (size_t c = 0; c < columns; c++) bundle.rows[c].push_back(job.slot->pieces[c]);
    }
    update(group, bundle, scaling);
  }
  for (const Job* job : jobs) {
    detail::mark_written(job->slot->parameter, fused);
    if (scaling) detail::mark_written(*job->gradient, fused);
    if (fused)
      for (const auto& written : job->slot->pieces) detail::mark_written(written, fused);
  }
}

Optimizer::Bundle Optimizer::Bundle::only(size_t i) const {
  Bundle one{{parameters[i]}, {gradients[i]}, {}, first};
  for (const auto& column : rows) one.rows.push_back({column[i]});
  return one;
}

// ---- saving and loading

std::vector<Tensors> Optimizer::groups() const {
  std::vector<Tensors> all;
  for (const auto& group : groups_) {
    all.emplace_back();
    for (const auto& slot : group) all.back().push_back(slot.parameter);
  }
  return all;
}

const Optimizer::Place& Optimizer::place_of(const at::Tensor& parameter) const {
  const auto found = places_.find(parameter.unsafeGetTensorImpl());
  TESSERA_CHECK(found != places_.end(), UsageError, kind(), ": this tensor of sizes ", parameter.sizes(),
                " is none of its parameters");
  return found->second;
}

StateDict Optimizer::state(const at::Tensor& parameter) const {
  const auto& place = place_of(parameter);
  const auto& slot = groups_[place.group][place.index];
  const auto described = rows();
  StateDict dict;
  for (size_t r = 0; r < slot.rows.size(); r++) dict.insert(described[r].name, slot.rows[r].detach());
  return dict;
}

void Optimizer::set_state(const at::Tensor& parameter, StateDict dict) {
  const at::NoGradGuard no_grad;
  changed();
  const auto& place = place_of(parameter);
  Tensors kept;
  for (const auto& row : rows()) {
    const at::Tensor* found = dict.find(row.name);
    if (!found) break;          // the optional ones are last
    if (!row.like_parameter) {  // other optimizers count steps in integers
      kept.push_back(found->to(step_device(place.group, parameter), at::kFloat).view(c10::IntArrayRef()));
      continue;
    }
    const auto &piece = local_or_self(*found), &like = local_or_self(parameter);
    if (detail::same_placement(*found, parameter) && piece.strides() == like.strides()) {
      kept.push_back(*found);
      continue;
    }
    auto laid_out = row_like(parameter, false);
    laid_out = laid_out.to(found->scalar_type());
    laid_out.copy_(*found);
    kept.push_back(laid_out);
  }
  auto& slot = groups_[place.group][place.index];
  slot.rows = std::move(kept);
  slot.pieces = detail::local_tensors_of(slot.rows);
  slot.fits.reset();
}

// ---- options

namespace detail {

void check_at_least_zero(const char* kind, const char* name, double value) {
  TESSERA_CHECK(value >= 0, UsageError, kind, ": ", name, " must be at least 0; found ", value);
}

void check_implementation(const char* kind, std::optional<bool> foreach, bool fused) {
  TESSERA_CHECK(!(fused && foreach.value_or(false)), UsageError, kind,
                ": foreach and fused are two implementations; ask for one of them");
}

}  // namespace detail
}  // namespace tessera::optim
