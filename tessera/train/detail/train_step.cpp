#include "tessera/train/detail/train_step.h"

#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/virtual_shards.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
#include "tessera/models/loss.h"
#include "tessera/numerics/numerics.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/loss_parallel.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace tessera::train {

struct TrainStep::State {
  ParallelModel& model;
  optim::AdamW& optimizer;
  optim::GradScaler scaler;
  int64_t accumulate;
  double clip;
  int64_t microbatches;  // of the pipeline or of accumulation
  Numerics numerics = Numerics::Strict;
  std::unique_ptr<VirtualShards> shards = {};  // with Numerics::Invariant
};

namespace {

// Accumulates the gradients of a batch and returns its loss. Runs eagerly or compiled.
template <class Model>
at::Tensor accumulate_gradients(TrainStep::State& state, Model& model, const at::Tensor& input,
                                const at::Tensor& target, const at::Tensor& scale) {
  model->zero_grad();
  at::Tensor total;
  const auto inputs = input.chunk(state.accumulate), targets = target.chunk(state.accumulate);
  for (size_t i = 0; i < inputs.size(); i++) {
    if (inputs.size() > 1) state.model.set_gradient_sync(i + 1 == inputs.size());
    const LossParallel loss_parallel;
    const auto sum = models::loss_sum(model(inputs[i]), targets[i], /*reuse_logits=*/true);
    const auto loss = tessera::detail::full_tensor_or_self(sum) * scale;
    state.scaler.scale(loss).backward();
    total = total.defined() ? total + loss.detach() : loss.detach();
  }
  state.model.reduce_gradients();
  return total;
}

// The same with invariant numerics: virtual shards take the place of accumulation. Returns the loss of the global
// batch.
template <class Model>
at::Tensor accumulate_virtual_shards(TrainStep::State& state, Model& model, const at::Tensor& input,
                                     const at::Tensor& target, const at::Tensor& scale) {
  auto& shards = *state.shards;
  model->zero_grad();
  std::vector<at::Tensor> sums;
  for (int64_t i = 0, passes = shards.local_count(); i < passes; i++) {
    const LossParallel loss_parallel;
    const auto context = shards.takes_full_rows(i) ? nullptr : state.model.context_scope();
    const auto rows = [&](const at::Tensor& x) {
      return context ? context->shard(shards.rows(x, i), 1) : shards.rows(x, i);
    };
    const auto sum = tessera::detail::full_tensor_or_self(models::loss_sum(model(rows(input)), rows(target)));
    (sum * scale).backward();
    shards.add_gradients();
    sums.push_back(sum.detach());
  }
  shards.reduce_gradients();
  return shards.sum(at::stack(sums)) * scale;
}

// The same through the stages of a pipeline, whose microbatches take the place of accumulation.
at::Tensor run_stages(TrainStep::State& state, const at::Tensor& input, const at::Tensor& target,
                      const at::Tensor& scale) {
  state.model.module().zero_grad();
  const LossParallel loss_parallel;
  std::vector<at::Tensor> sums;
  state.model.step_stages(input, target, [&](const at::Tensor& logits, const at::Tensor& target) {
    const auto sum = tessera::detail::full_tensor_or_self(models::loss_sum(logits, target));
    sums.push_back(sum.detach());
    return state.scaler.scale(sum * scale);
  });
  auto total = at::zeros_like(scale);
  if (sums.empty()) return total;  // the last stage is on another rank
  if (state.numerics == Numerics::Invariant) {
    const auto& stages = state.model.stages();
    for (size_t i = 0; i < stages.size(); i++)
      if (stages[i].stage_index() + 1 == stages[i].num_stages())
        return state.model.stage_shards()[i]->sum(at::stack(sums)) * scale;
  }
  for (const auto& sum : sums) total += sum * scale;
  return total;
}

// The norm of the gradients of all stages with the bits of one rank: the norms of the parameters, in the order of the
// optimizer of one rank, and then theirs.
at::Tensor invariant_norm_of_stages(TrainStep::State& state) {
  const auto counted = state.model.counted_parameters();
  std::vector<at::Tensor> norms;
  for (const bool matrices : {true, false})
    for (const auto& p : state.model.module().parameters()) {
      if ((p.dim() > 1) != matrices) continue;
      const bool is_mine = std::ranges::any_of(counted, [&](const at::Tensor& each) { return each.is_same(p); });
      norms.push_back(is_mine ? tessera::detail::full_tensor_or_self(at::linalg_vector_norm(p.grad()))
                              : at::zeros({}, at::kFloat));
    }
  auto bits = at::stack(norms).view(at::kInt);  // a sum of integers is exact, and all but one rank have 0
  state.model.sum_over_stages(bits);
  return at::linalg_vector_norm(bits.view(at::kFloat));
}

// With stages, the norm of the gradients of all stages.
at::Tensor clip_gradients(TrainStep::State& state) {
  const double max_norm = state.clip > 0 ? state.clip : std::numeric_limits<double>::infinity();
  if (!state.model.has_stages()) return optim::clip_grad_norm_(state.optimizer.parameters(), max_norm);
  const at::NoGradGuard no_grad;
  at::Tensor norm;
  if (state.numerics == Numerics::Invariant) {
    norm = invariant_norm_of_stages(state);
  } else {
    const auto counted = state.model.counted_parameters();
    auto squares = optim::get_total_norm(optim::detail::reduce_partial_gradients(counted)).square();
    state.model.sum_over_stages(squares);
    norm = squares.sqrt();
  }
  optim::clip_grads_with_norm_(state.optimizer.parameters(), max_norm, norm);
  return norm;
}

// A router's loss is averaged over microbatches and ranks, and has the scale of the loss.
void set_aux_loss_scale(TrainStep::State& state) {
  const auto experts = state.model.experts();
  if (experts.empty()) return;
  const double scale = state.scaler.get_scale() / static_cast<double>(state.microbatches);
  for (auto [layer, moe] : experts) moe->aux_loss_scale = scale;
}

}  // namespace

TrainStep::TrainStep(const TrainConfig& config, ParallelModel& model, optim::AdamW& optimizer)
    : state_(new State{model, optimizer, optim::GradScaler({.enabled = config.training.precision == "fp16"}),
                       config.training.accumulate, config.optimizer.clip,
                       model.has_stages() ? model.microbatches() : config.training.accumulate}) {
  if (config.training.numerics == "invariant") {
    state_->numerics = Numerics::Invariant;
    state_->microbatches = config.training.virtual_shards;  // of all ranks: gradients are sums over them
  }
  if (model.has_stages()) {
    run_ = [state = state_](const at::Tensor& input, const at::Tensor& target, const at::Tensor& scale) {
      return run_stages(*state, input, target, scale);
    };
    return;
  }
  if (state_->numerics == Numerics::Invariant) {
    const auto per_rank =
        config.training.virtual_shards / std::max<int64_t>(1, model.data_mesh() ? model.data_mesh().size() : 1);
    // Experts get other numbers of tokens from each virtual shard.
    const auto at_once = model.experts().empty() ? std::max<int64_t>(1, per_rank / config.training.accumulate) : 1;
    state_->shards = std::make_unique<VirtualShards>(model.module(), model.data_mesh(), config.training.virtual_shards,
                                                     at_once, model.has_axis("cp") ? model.mesh()["cp"] : DeviceMesh());
    model.set_gradient_sync(false);
  }
  std::visit(
      [&](auto& holder) {
        using Model = std::remove_reference_t<decltype(holder)>;
        const auto eager = [state = state_](Model& model, const at::Tensor& input, const at::Tensor& target,
                                            const at::Tensor& scale) {
          const auto accumulate = state->shards ? accumulate_virtual_shards<Model> : accumulate_gradients<Model>;
          return accumulate(*state, model, input, target, scale);
        };
        const auto bind = [&](auto step) {
          run_ = [holder, step](const at::Tensor& input, const at::Tensor& target, const at::Tensor& scale) mutable {
            return step(holder, input, target, scale);
          };
        };
        if (config.training.compile) {
          auto compiled = compile(eager, {.captures = Captures::None});  // nothing that it captures changes
          recompiles_ = [compiled] { return compiled.recompiles(); };    // copies share the programs
          if (!state_->shards) return bind(compiled);
          // The first step compares bits of virtual shards, and is eager.
          bind([eager, compiled, is_first = true](auto&... arguments) mutable {
            return std::exchange(is_first, false) ? eager(arguments...) : compiled(arguments...);
          });
        } else {
          bind(eager);
        }
      },
      model.language_model());
}

TrainStep::~TrainStep() = default;

StepResult TrainStep::forward_backward(const at::Tensor& input, const at::Tensor& target, int64_t counted) {
  auto& state = *state_;
  // Virtual shards are summed, not averaged over ranks.
  const auto loss_ranks = state.numerics == Numerics::Invariant ? 1 : state.model.loss_ranks();
  const double scale = static_cast<double>(loss_ranks) / static_cast<double>(counted);
  const NumericsScope numerics(state.numerics);
  set_aux_loss_scale(state);
  // Backward may recompute attention, so the scope includes it.
  const auto context = state.shards ? nullptr : state.model.context_scope();
  const auto mine = [&](const at::Tensor& x) { return context ? context->shard(x, 1) : x; };
  const auto loss = run_(mine(input), mine(target), at::scalar_tensor(scale, input.options().dtype(at::kFloat)));
  state.scaler.unscale_(state.optimizer);
  if (on_gradients) on_gradients();
  if (state.scaler.enabled() && state.model.has_stages()) {  // all stages skip a step together
    auto found_inf = state.scaler.found_inf(state.optimizer);
    state.model.sum_over_stages(found_inf);
    found_inf.clamp_max_(1);
  }
  return {loss, clip_gradients(state)};
}

void TrainStep::update(const at::Tensor& bad) {
  const NumericsScope numerics(state_->numerics);
  if (bad.defined() && !state_->scaler.enabled())
    state_->optimizer.step(optim::Optimizer::Scaling{{}, bad});
  else
    state_->scaler.step(state_->optimizer);
  state_->scaler.update();
}

void TrainStep::skip() { state_->scaler.update(); }

optim::GradScaler& TrainStep::scaler() { return state_->scaler; }

std::unique_ptr<optim::AdamW> make_optimizer(const OptimizerOptions& o, const ParallelModel& model) {
  const optim::AdamWOptions options{
      .lr = o.lr, .betas = {o.beta1, o.beta2}, .eps = o.eps, .weight_decay = o.weight_decay, .fused = true};
  auto without_decay = options;
  without_decay.weight_decay = 0;
  optim::AdamW::Group matrices{{}, options}, vectors{{}, without_decay};
  for (const auto& [name, p] : model.parameters()) (p.dim() > 1 ? matrices : vectors).params.push_back(p);
  std::vector<optim::AdamW::Group> groups;
  for (auto* group : {&matrices, &vectors})  // a pipeline stage may have no vectors
    if (!group->params.empty()) groups.push_back(std::move(*group));
  return std::make_unique<optim::AdamW>(std::move(groups));
}

}  // namespace tessera::train
