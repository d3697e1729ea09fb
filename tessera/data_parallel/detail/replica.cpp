#include "tessera/data_parallel/detail/replica.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/data_parallel/detail/broadcast.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>

namespace tessera::data_parallel {
namespace {

comm::Group ddp_group(const std::string& what, const DDPOptions& options) {
  const auto& mesh = options.device_mesh;
  TESSERA_CHECK(!mesh || !options.process_group, UsageError, what,
                ": both device_mesh and process_group are given; give one");
  if (!mesh) return options.process_group.group();
  TESSERA_CHECK(mesh.ndim() == 1, UsageError, what, ": device_mesh ", mesh, " has ", mesh.ndim(),
                " axes; give the one to average over, as in mesh[\"", mesh.names().empty() ? "dp" : mesh.names()[0],
                "\"]");
  return mesh.get_group();
}

BucketLimits limits_from(const std::string& what, const DDPOptions& options) {
  if (!options.bucket_cap_mb) return {};
  TESSERA_CHECK(*options.bucket_cap_mb > 0 && std::isfinite(*options.bucket_cap_mb), UsageError, what,
                ": bucket_cap_mb is ", *options.bucket_cap_mb, "; a bucket holds at least one byte");
  const auto cap = std::max<int64_t>(1, static_cast<int64_t>(*options.bucket_cap_mb * (1 << 20)));
  return {cap, cap};
}

// A DTensor parameter must be distributed over other axes than the one over which gradients are averaged. Otherwise its
// gradient would be reduced twice.
void check_mesh(const std::string& what, const NamedTensor& parameter, const comm::Communicator& group) {
  if (!is_dtensor(parameter.value)) return;
  const DTensor value(parameter.value);
  const auto mesh = value.device_mesh();
  const int64_t here = group.ranks()[static_cast<size_t>(group.rank())];
  for (const int64_t rank : mesh.ranks())
    TESSERA_CHECK(rank == here || std::find(group.ranks().begin(), group.ranks().end(), rank) == group.ranks().end(),
                  UsageError, what, ": parameter ", parameter.name, " is ", value, ", and rank ", rank,
                  " of that mesh is also in group '", group.name(),
                  "', over which gradients are averaged. Distribute it over the other axes only");
}

}  // namespace

Replica::Replica(std::string what, const torch::nn::Module& module, const DDPOptions& options,
                 const std::vector<const torch::nn::Module*>& ignored, ReducerMode mode)
    : what_(std::move(what)),
      parameters_(parameters_of(module, ignored)),
      sparse_(sparse_parameters_of(module, ignored)),
      group_(ddp_group(what_, options)),
      options_(options),
      mode_(mode),
      buffers_stale_(!options.init_sync) {
  for (const auto& buffer : buffers_of(module, ignored)) buffers_.push_back(buffer.value);
  TESSERA_CHECK(!parameters_.empty(), UsageError, what_,
                ": the module has no parameters, so there is nothing to average; use the module without it");
  const auto device = local_or_self(parameters_[0].value).device();
  for (const auto& parameter : parameters_) {
    const auto& local = local_or_self(parameter.value);
    TESSERA_CHECK(!local.is_meta() && !is_deferred(parameter.value), UsageError, what_, ": parameter ", parameter.name,
                  " has no values yet; call materialize(module) first");
    TESSERA_CHECK(local.device().type() == device.type(), UsageError, what_, ": parameter ", parameter.name, " is on ",
                  local.device(), " and ", parameters_[0].name, " on ", device, "; move the module to one device");
    check_mesh(what_, parameter, *group_);
  }
  limits_from(what_, options_);
  check_agreement();
  frozen_.start(parameters_);
  if (options_.init_sync) {
    Tensors all = buffers_;
    for (const auto& parameter : parameters_) all.push_back(parameter.value);
    broadcast_from_first(all, group_);
  }
  if (mode_ == ReducerMode::Buckets) make_reducer();
}

void Replica::check_agreement() const {
  std::vector<std::string> lines;
  for (const auto& [name, value] : parameters_) {
    const auto& local = local_or_self(value);
    lines.push_back(c10::str(name, " ", local.scalar_type(), local.sizes(),
                             local.is_contiguous() ? "" : c10::str(" strides ", local.strides()),
                             value.requires_grad() ? "" : " frozen"));
  }
  for (size_t i = 0; i < buffers_.size(); i++)
    lines.push_back(c10::str("buffer ", i, " ", buffers_[i].scalar_type(), buffers_[i].sizes()));
  lines.push_back(c10::str("bucket_cap_mb ", options_.bucket_cap_mb.value_or(-1), ", find_unused_parameters ",
                           options_.find_unused_parameters, ", static_graph ", options_.static_graph, ", ", mode_));
  comm::require_same_on_all_ranks(group_, what_, lines);
}

void Replica::make_reducer() {
  if (mode_ == ReducerMode::Buckets) {
    reducer_ =
        Reducer::make(parameters_, group_,
                      {limits_from(what_, options_), options_.find_unused_parameters, options_.gradient_as_bucket_view,
                       options_.static_graph, options_.uneven_accumulation, sparse_});
    if (hook_) reducer_->set_hook(hook_);
    if (step_) reducer_->set_step(step_);
    return;
  }
  per_parameter_ = PerParameterReducer::make(parameters_, group_);
  if (hook_) per_parameter_->add_hook(hook_);
}

void Replica::set_requires_gradient_sync(bool sync) {
  sync_ = sync;
  if (per_parameter_ && forward_is_compiled_) per_parameter_->set_sync(sync);
}

void Replica::before_forward() {
  if (torch::autograd::get_current_graph_task_id() != -1) return;  // activation checkpointing runs forward again
  TESSERA_CHECK(
      sparse_.empty() || !compiling(), UsageError, what_,
      ": the module has an embedding with sparse(true). A compiled step needs gradients of fixed size: create ",
      "the embedding with sparse(false), or do not compile the step");
  if (mode_ == ReducerMode::PerParameter && !per_parameter_ && !compiling()) mode_ = ReducerMode::Buckets;
  const bool joins = join_ && sync_ && c10::GradMode::is_enabled();
  if (joins) join_->announce(Join::Phase::Forward);
  if (sync_ && c10::GradMode::is_enabled()) frozen_.check(what_, parameters_, {group_});
  if (!reducer_ && !per_parameter_) make_reducer();
  if (reducer_ && (joins || !join_ || !sync_)) reducer_->before_forward(sync_);
  if (per_parameter_) per_parameter_->set_sync(sync_);
  forward_is_compiled_ |= compiling();
  if (join_ && !joins) return;  // ranks that have joined do not see this forward
  if (std::exchange(buffers_stale_, sync_ && c10::GradMode::is_enabled()) && options_.broadcast_buffers &&
      !buffers_.empty())
    broadcast_from(joins ? join_->last_active() : 0, buffers_, group_);
}

// The collectives of a forward of the other ranks.
void Replica::shadow_forward() {
  reducer_->before_forward(true);
  if (std::exchange(buffers_stale_, true) && options_.broadcast_buffers && !buffers_.empty())
    broadcast_from(join_->last_active(), buffers_, group_);
}

void Replica::join(const std::function<void()>& body, const JoinOptions& options) {
  if (!options.enable) return body();
  TESSERA_CHECK(mode_ == ReducerMode::Buckets && !compiling() && reducer_, UsageError, what_,
                ": join() needs the reducer with buckets, in eager mode; give each rank as many batches instead");
  TESSERA_CHECK(!join_, UsageError, what_, ": join() is called inside of join()");
  join_ = std::make_unique<Join>(group_, local_or_self(parameters_[0].value).device(), options);
  reducer_->set_join(join_.get());
  const auto leave = c10::make_scope_exit([&] {
    reducer_->set_join(nullptr);
    join_.reset();
  });
  body();
  const at::NoGradGuard no_grad;
  for (;;) {
    const auto phase = join_->shadow();
    if (phase == Join::Phase::Joined) break;
    if (phase == Join::Phase::Forward)
      shadow_forward();
    else
      reducer_->shadow_backward();
  }
  Tensors all = buffers_;
  for (const auto& parameter : parameters_) all.push_back(parameter.value);
  broadcast_from(join_->last_joiner(), all, group_);
}

void Replica::after_forward(const Tensors& outputs) {
  if (reducer_ && torch::autograd::get_current_graph_task_id() == -1) reducer_->after_forward(outputs);
}

void Replica::register_comm_hook(CommHook hook) {
  TESSERA_CHECK(!hook_, UsageError, what_,
                ": a comm hook is registered already; register only one, or gradients are reduced twice");
  TESSERA_CHECK(hook, UsageError, what_, ": register_comm_hook was given an empty function");
  hook_ = std::move(hook);
  if (reducer_) reducer_->set_hook(hook_);
  if (per_parameter_) per_parameter_->add_hook(hook_);
}

void Replica::step_in_backward(ParameterStep step) {
  TESSERA_CHECK(mode_ == ReducerMode::Buckets, UsageError, what_, ": step_in_backward needs the reducer with buckets");
  step_ = std::move(step);
  if (reducer_) reducer_->set_step(step_);
}

}  // namespace tessera::data_parallel
