#include "tessera/data_parallel/detail/reducer.h"

#include "tessera/base/detail/same_storage.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/sparse_gradient.h"
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/tracing/detail/restart_trace.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <limits>

namespace tessera::data_parallel {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// Part of `flat` with the parameter's shape, and with its strides if they are dense. Autograd does not treat it as a
// view, because optimizers call detach_() on gradients.
at::Tensor view_in(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (like.is_non_overlapping_and_dense()) return at::as_strided(flat, like.sizes(), like.strides(), offset);
  return flat.narrow(0, offset, like.numel()).view(like.sizes());
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return same_storage(a, b) && a.storage_offset() == b.storage_offset() && a.strides() == b.strides();
}

std::string to_text(const std::vector<size_t>& order) {
  std::string text;
  for (const size_t i : order) text += std::to_string(i) + " ";
  return text;
}

std::vector<size_t> to_order(const std::string& text) {
  std::vector<size_t> order;
  for (const char *at = text.data(), *end = at + text.size(); at < end; at++) {
    size_t i = 0;
    at = std::from_chars(at, end, i).ptr;
    order.push_back(i);
  }
  return order;
}

}  // namespace

Reducer::Reducer(NamedTensors parameters, comm::Group group, ReducerOptions options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(options),
      stopped_ranks_(group_),
      scale_(at::native::wrapped_scalar_tensor(1.0 / static_cast<double>(group_->size()))),
      states_(parameters_.size()) {
  for (size_t i = 0; i < states_.size(); i++)
    for (const auto& sparse : options_.sparse) states_[i].sparse |= sparse.is_same(parameters_[i].value);
  has_sparse_ = !options_.sparse.empty();
  make_first_buckets();
}

std::shared_ptr<Reducer> Reducer::make(NamedTensors parameters, comm::Group group, ReducerOptions options) {
  const std::shared_ptr<Reducer> reducer(new Reducer(std::move(parameters), std::move(group), options));
  const std::weak_ptr<Reducer> weak = reducer;
  for (size_t i = 0; i < reducer->parameters_.size(); i++)
    reducer->handles_.push_back(
        register_hook_on_any_leaf(reducer->parameters_[i].value, [&](const at::Tensor& parameter) {
          return register_post_accumulate_grad_hook(parameter, [weak, i](const at::Tensor&) {
            if (const auto self = weak.lock()) self->gradient_accumulated(i);
          });
        }));
  return reducer;
}

// Frozen parameters leave their bucket, but not before their gradients are reduced. Equal on all ranks.
bool Reducer::is_reduced(size_t i) const {
  const bool may_have_gradient = states_[i].in_bucket || states_[i].trained_unsynced;
  return parameters_[i].value.requires_grad() || (may_have_gradient && unreduced_passes_ > 0);
}

void Reducer::make_first_buckets() {
  num_in_buckets_ = 0;
  for (size_t i = 0; i < states_.size(); i++) num_in_buckets_ += states_[i].in_bucket = belongs_in_bucket(i);
  for (auto& state : states_) state.expected = 1;
  order_.clear();
  rebuilt_ = graph_recorded_ = false;
  // The order in which gradients become ready is not known yet. So the first pass uses one bucket for all gradients.
  // With find_unused_parameters some gradients may never be ready, so the final buckets are made now: as in PyTorch,
  // filled from the first parameter on, and reduced from the last bucket on.
  auto plan =
      fill_buckets(items(), in_buckets(), finds_unused() ? options_.limits : BucketLimits{kUnlimited, kUnlimited});
  std::sort(plan.begin(), plan.end(), [](const Bucket& a, const Bucket& b) { return a.front() > b.front(); });
  make_buckets(std::move(plan));
}

std::vector<size_t> Reducer::in_buckets() const {
  std::vector<size_t> which;
  for (size_t i = 0; i < states_.size(); i++)
    if (states_[i].in_bucket) which.push_back(i);
  return which;
}

Reducer::~Reducer() {
  for (auto& handle : handles_) handle.remove();
  if (std::uncaught_exceptions() == 0) stopped_ranks_.record_stop(passes_);  // an exception has its own message
}

void Reducer::set_hook(CommHook hook) {
  TESSERA_CHECK(!hook_, UsageError,
                "a comm hook is registered already; register only one, or gradients are reduced twice");
  hook_ = std::move(hook);
  if (group_->size() == 1) make_buckets(plan_);  // with memory
}

std::vector<BucketItem> Reducer::items() const {
  std::vector<BucketItem> items;
  for (const auto& [name, value] : parameters_) {
    const auto& local = local_or_self(value);
    items.push_back({static_cast<int64_t>(local.nbytes()), local.scalar_type(), local.device()});
  }
  return items;
}

std::vector<std::string> Reducer::names(const std::vector<size_t>& which) const {
  std::vector<std::string> names;
  for (const size_t i : which) names.push_back(parameters_[i].name);
  return names;
}

void Reducer::make_buckets(Buckets plan) {
  plan_ = std::move(plan);
  buckets_ = std::vector<BucketState>(plan_.size());
  slots_.resize(parameters_.size());
  for (size_t b = 0; b < plan_.size(); b++) {
    int64_t total = 0;
    for (const size_t i : plan_[b]) total += local_or_self(parameters_[i].value).numel();
    auto& bucket = buckets_[b];
    for (size_t slot = 0; slot < plan_[b].size(); slot++) slots_[plan_[b][slot]] = {b, slot};
    if (is_alone()) continue;
    bucket.flat = at::empty({total}, local_or_self(parameters_[plan_[b][0]].value).options().requires_grad(false));
    int64_t offset = 0;
    for (const size_t i : plan_[b]) {
      const auto& local = local_or_self(parameters_[i].value);
      bucket.views.push_back(view_in(bucket.flat, offset, local));
      offset += local.numel();
    }
  }
}

// Runs once: makes buckets in the order in which gradients became ready on the group's first rank.
void Reducer::rebuild() {
  rebuilt_ = true;
  const auto order = to_order(comm::broadcast_text(group_, "the order of gradients", to_text(order_)));
  const auto old = std::move(buckets_);
  const auto old_slots = slots_;
  make_buckets(fill_buckets(items(), order, options_.limits));
  if (!options_.gradient_as_bucket_view || is_alone()) return;
  for (const size_t i : in_buckets()) {  // move gradients that are views of the old buckets
    const auto& [name, value] = parameters_[i];
    if (!value.grad().defined()) continue;
    const auto& local = local_gradient(value, name);
    if (!same_memory(local, old[old_slots[i].bucket].views[old_slots[i].slot])) continue;
    view_of(i).copy_(local);
    set_local_gradient(value, view_of(i));
  }
}

void Reducer::before_forward(bool sync) {
  if (torch::autograd::get_current_graph_task_id() != -1) return;  // activation checkpointing runs forward again
  const at::NoGradGuard no_grad;
  abandon();
  sync_ = sync;
  if (!sync) {
    for (size_t i = 0; i < states_.size(); i++) states_[i].trained_unsynced |= parameters_[i].value.requires_grad();
    return;
  }
  bool same = true;
  for (size_t i = 0; i < states_.size(); i++) same &= states_[i].in_bucket == belongs_in_bucket(i);
  // With find_unused_parameters buckets are not rebuilt: another rank may not have seen all gradients.
  const bool seen_all = !rebuilt_ && !finds_unused() && order_.size() == num_in_buckets_ && num_in_buckets_ > 0;
  if (same && !seen_all) return;
  const auto make_new = [&] { same ? rebuild() : make_first_buckets(); };
  if (!CompilingScope::is_step()) return make_new();
  const OpModesOff off;
  make_new();
  throw RestartTrace{};  // the program uses the new buckets, but does not make them
}

void Reducer::after_forward(const Tensors& outputs) {
  for (const auto& output : outputs)
    if (output.defined() && output.requires_grad() && !output.is_leaf())  // a leaf would keep the hook for good
      output.register_hook([self = shared_from_this()](const at::Tensor&) {
        // With static_graph backward may be nested. With find_unused_parameters it may compute no gradient at all,
        // and still takes part in the reduction (not in autograd::grad, which accumulates nothing).
        const at::NoGradGuard no_grad;
        const auto* inputs = torch::autograd::get_current_graph_task_exec_info();
        if (self->options_.static_graph || (self->finds_unused() && (!inputs || inputs->empty()))) self->begin_pass();
      });
}

// After a pass that failed: waits for the collectives that it started.
void Reducer::abandon() {
  if (!std::exchange(in_pass_, false)) return;
  const size_t num_started = std::exchange(num_started_, 0);
  for (size_t b = 0; b < num_started; b++) buckets_[b].result.take(group_);
}

void Reducer::begin_pass() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == graph_task_ || (in_pass_ && options_.static_graph)) return;  // a nested backward
  abandon();
  graph_task_ = task;
  passes_++;
  for (auto& state : states_) state.ready = state.used = false, state.calls = 0;
  unreduced_passes_ += !sync_;
  if (!sync_ || (num_in_buckets_ == 0 && !has_sparse_)) return;
  if (join_) join_->announce(Join::Phase::Backward);
  start_reduction();
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->finish_pass(); });
  if (is_recording_graph()) return;
  for (const size_t i : in_buckets()) {
    const bool frozen = !parameters_[i].value.requires_grad();  // after the forward, or gradients wait since no_sync()
    const bool unused = frozen || (finds_unused() ? !will_accumulate(parameters_[i].value) : states_[i].expected == 0);
    any_frozen_ |= frozen;
    if (unused) mark_ready(i);
  }
}

// The state of a new pass with reduction.
void Reducer::start_reduction() {
  in_pass_ = true;
  reduced_passes_++;
  num_started_ = 0;
  if (join_) scale_ = at::native::wrapped_scalar_tensor(join_->scale());
  if (order_.size() < num_in_buckets_) order_.clear();  // left by a pass that failed
  for (size_t b = 0; b < buckets_.size(); b++) buckets_[b].pending = plan_[b].size();
  std::vector<bool> requires_grad;
  for (const auto& parameter : parameters_) requires_grad.push_back(parameter.value.requires_grad());
  frozen_ = RequiresGradHash(requires_grad);
  any_frozen_ = false;
}

double Reducer::scale() const { return join_ ? join_->scale() : 1.0 / static_cast<double>(group_->size()); }

void Reducer::set_join(Join* join) {
  join_ = join;
  options_.uneven_accumulation = true;  // from now on, labels count the reduced passes, which all ranks have
  if (!join) scale_ = at::native::wrapped_scalar_tensor(scale());
}

void Reducer::shadow_backward() {
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(!is_recording_graph(), UsageError,
                "join: this rank has no batch at all, and static_graph records the graph in the first backward of ",
                "every rank; give each rank one batch, or do not set static_graph");
  abandon();
  passes_++;
  for (auto& state : states_) state.ready = state.used = false, state.calls = 0;
  start_reduction();
  const auto kept = std::move(buckets_);  // .grad may be a view of them
  make_buckets(plan_);
  for (auto& bucket : buckets_) bucket.flat.zero_();
  for (const size_t i : in_buckets())
    if (!rebuilt_ && !finds_unused() && std::find(order_.begin(), order_.end(), i) == order_.end()) order_.push_back(i);
  try {
    start_ready_buckets();
    const auto used = used_on_any_rank();
    for (auto& bucket : buckets_) bucket.result.take(group_);
    for (size_t i = 0; i < states_.size(); i++)
      if (states_[i].sparse && is_reduced(i) && used[i])
        reduce_sparse_gradient({}, parameters_[i].value, scale(), group_, parameters_[i].name);
  } catch (const CommError& error) {
    fail_in(num_started_, error);
  }
  buckets_ = kept;
  in_pass_ = false;
}

void Reducer::gradient_accumulated(size_t i) {
  if (!parameters_[i].value.requires_grad()) return;  // frozen after its forward: LibTorch adds no gradient
  const at::NoGradGuard no_grad;
  begin_pass();
  auto& state = states_[i];
  state.calls++;
  if (!sync_) {
    state.unsynced = true;
    return;
  }
  if (state.sparse) {
    state.ready = state.used = true;
    return;
  }
  TESSERA_CHECK(state.in_bucket, UsageError, "parameter ", parameters_[i].name, " got a gradient in backward pass ",
                passes_, ", but was frozen in the last forward with synchronization; call requires_grad_(true) before ",
                "that forward");
  if (is_recording_graph()) {
    std::erase(order_, i);
    order_.push_back(i);
    return;
  }
  if (state.calls < state.expected) return;
  TESSERA_CHECK(state.calls == state.expected, UsageError, "parameter ", parameters_[i].name, " got its gradient ",
                state.calls, " times in backward pass ", passes_, " (expected: ", state.expected,
                "); static_graph promises that the graph does not change");
  state.used = true;
  mark_ready(i);
}

// Copies the gradient of parameter i, or zeros, to its bucket and starts buckets that are complete.
void Reducer::mark_ready(size_t i) {
  if (!rebuilt_ && !finds_unused() && std::find(order_.begin(), order_.end(), i) == order_.end()) order_.push_back(i);
  states_[i].ready = true;
  states_[i].used |= has_unreduced_gradient(i);
  copy_to_bucket(i);
  if (--buckets_[slots_[i].bucket].pending == 0) start_ready_buckets();
}

// False after zero_grad().
bool Reducer::has_unreduced_gradient(size_t i) const {
  return states_[i].unsynced && parameters_[i].value.grad().defined();
}

void Reducer::copy_to_bucket(size_t i) {
  const auto& [name, value] = parameters_[i];
  if (is_alone()) {
    if (value.grad().defined()) local_gradient(value, name);
    return;
  }
  auto& view = view_of(i);
  if (!value.grad().defined()) {
    view.zero_();
    return;
  }
  const auto& gradient = local_gradient(value, name);
  TESSERA_CHECK(gradient.sizes() == view.sizes() && gradient.scalar_type() == view.scalar_type(), UsageError,
                "parameter ", name, " was ", view.scalar_type(), view.sizes(),
                " on this rank when it was wrapped; its ", "gradient is ", gradient.scalar_type(), gradient.sizes(),
                ". Change layouts and dtypes before wrapping");
  const bool in_place = same_memory(gradient, view);
  const bool scaled = hook_ || group_->size() == 1;  // a comm hook divides itself
  if (in_place && !scaled) view.mul_(scale_);
  if (!in_place && scaled) view.copy_(gradient);
  if (!in_place && !scaled) at::mul_out(view, gradient, scale_);
}

// Rethrows an error of the group with the names of the parameters in the bucket.
void Reducer::fail_in(size_t bucket, const CommError& error) {
  in_pass_ = false;
  TESSERA_FAIL(CommError, "backward pass ", passes_, ", gradients of ",
               join_names(names(plan_.empty() ? Bucket() : plan_[std::min(bucket, plan_.size() - 1)])), ": ",
               error.what_without_backtrace(), stopped_ranks_.describe());
}

// Every rank starts buckets in the same order, whatever the order in which gradients become ready.
void Reducer::start_ready_buckets() {
  if (is_alone()) return;
  for (; num_started_ < buckets_.size() && buckets_[num_started_].pending == 0; num_started_++) try {
      start_bucket(buckets_[num_started_]);
    } catch (const CommError& error) {
      fail_in(num_started_, error);
    }
}

void Reducer::start_bucket(BucketState& bucket) {
  bucket.label = "pass " + std::to_string(pass_number()) + " bucket " + std::to_string(num_started_) + " of " +
                 std::to_string(buckets_.size()) + frozen_.text();  // c10::str takes longer than a small bucket
  const comm::CollectiveLabel label(
      bucket.label.c_str(),
      frozen_.number(static_cast<int32_t>(pass_number() * 4096 + static_cast<int64_t>(num_started_))));
  if (!hook_) {
    comm::all_reduce_(bucket.flat, ReduceOp::Sum, group_);
    bucket.result = bucket.flat;
    return;
  }
  Tensors parameters;
  for (const size_t i : plan_[num_started_]) parameters.push_back(parameters_[i].value);
  const bool is_last = num_started_ + 1 == buckets_.size();
  GradBucket grad_bucket(num_started_, is_last, bucket.flat, bucket.views, std::move(parameters), group_);
  bucket.result = hook_(grad_bucket);
}

// First pass with static_graph: records how often each hook was called, and which parameters are never used. Throws if
// ranks differ.
void Reducer::record_static_graph() {
  std::vector<std::string> lines;
  for (const size_t i : in_buckets()) {
    states_[i].expected = states_[i].calls;
    states_[i].used = states_[i].calls > 0;
    lines.push_back(c10::str(parameters_[i].name, " with ", states_[i].calls, " gradients per pass"));
  }
  comm::require_same_on_all_ranks(group_, "static_graph", lines);
  graph_recorded_ = true;
  for (const size_t i : in_buckets()) mark_ready(i);
}

// At the end of backward: a parameter that is not ready has no gradient, or one from a pass under no_sync(). Otherwise
// it is unused, which is an error.
void Reducer::handle_missing_gradients() {
  std::vector<size_t> unused;
  for (const size_t i : in_buckets()) {
    if (states_[i].ready) continue;
    const bool has_gradient =
        has_unreduced_gradient(i) || (!options_.static_graph && will_accumulate(parameters_[i].value));
    if (has_gradient)
      mark_ready(i);
    else
      unused.push_back(i);
  }
  for (size_t i = 0; i < states_.size(); i++)
    if (states_[i].sparse && parameters_[i].value.requires_grad() && !states_[i].ready && !has_unreduced_gradient(i) &&
        !options_.find_unused_parameters)
      unused.push_back(i);
  TESSERA_CHECK(unused.empty(), UsageError, "parameters ", join_names(names(unused)), " got no gradient in backward ",
                "pass ", passes_, " of rank ", group_->ranks()[static_cast<size_t>(group_->rank())], ". ",
                options_.static_graph ? "static_graph promises that the graph does not change"
                                      : "Use them in the loss, freeze them with requires_grad_(false), set "
                                        "find_unused_parameters, or put all but the last backward under no_sync()");
}

// Which parameters have a gradient on some rank. The others keep their .grad.
std::vector<bool> Reducer::used_on_any_rank() {
  std::vector<bool> used(states_.size(), true);
  if (!finds_unused() && !any_frozen_) {
    for (size_t i = 0; i < states_.size(); i++) used[i] = states_[i].expected > 0 || states_[i].used;
    return used;
  }
  for (size_t i = 0; i < states_.size(); i++) used[i] = states_[i].used;
  if (group_->size() == 1) return used;
  const std::vector<int32_t> here(used.begin(), used.end());
  const auto counts = at::tensor(here).to(local_or_self(parameters_[0].value).device());
  const comm::CollectiveLabel label("used parameters", static_cast<int32_t>(pass_number() * 4096 + 4095));
  comm::all_reduce_(counts, ReduceOp::Sum, group_);
  funcol::wait(counts, group_);
  const auto read = counts.cpu();
  for (size_t i = 0; i < states_.size(); i++) used[i] = read.data_ptr<int32_t>()[i] > 0;
  return used;
}

void Reducer::copy_from_bucket(size_t i) {
  const auto& [name, value] = parameters_[i];
  const auto& view = view_of(i);
  if (!value.grad().defined()) {
    set_local_gradient(value, options_.gradient_as_bucket_view ? view : view.clone());
    return;
  }
  const auto& local = local_gradient(value, name);
  if (same_memory(local, view)) return;
  if (options_.gradient_as_bucket_view)
    set_local_gradient(value, view);
  else
    local.copy_(view);
}

void Reducer::finish_pass() {
  const at::NoGradGuard no_grad;
  if (!in_pass_) return;  // abandon() ended it
  if (is_recording_graph()) record_static_graph();
  handle_missing_gradients();
  size_t at = 0;
  try {
    const auto used = used_on_any_rank();
    for (; at < buckets_.size(); at++) {
      if (!is_alone()) {
        auto& bucket = buckets_[at];
        const auto reduced = bucket.result.take(group_);
        TESSERA_CHECK(reduced.numel() == bucket.flat.numel(), UsageError, "the comm hook returned ", reduced.numel(),
                      " values for bucket ", at, ", which has ", bucket.flat.numel());
        if (!reduced.is_same(bucket.flat)) bucket.flat.copy_(reduced.view_as(bucket.flat));
        for (const size_t i : plan_[at])
          if (used[i]) copy_from_bucket(i);
      }
      if (step_) step_bucket(plan_[at], used);
    }
    reduce_sparse(used);
  } catch (const CommError& error) {
    fail_in(at, error);
  }
  for (auto& state : states_) state.unsynced = state.trained_unsynced = false;
  unreduced_passes_ = 0;
  in_pass_ = false;
}

void Reducer::reduce_sparse(const std::vector<bool>& used) {
  for (size_t i = 0; i < states_.size(); i++) {
    if (!states_[i].sparse || !is_reduced(i) || !used[i]) continue;
    const auto& [name, value] = parameters_[i];
    value.mutable_grad() = reduce_sparse_gradient(value.grad(), value, scale(), group_, name);
    if (step_) step_bucket({i}, used);
  }
}

void Reducer::step_bucket(const Bucket& bucket, const std::vector<bool>& used) {
  for (const size_t i : bucket) {
    if (!used[i] || !parameters_[i].value.grad().defined()) continue;
    step_(parameters_[i].value);
    parameters_[i].value.mutable_grad().reset();
  }
}

}  // namespace tessera::data_parallel
