#include "tessera/train/detail/train_step.h"

#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
#include "tessera/models/loss.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/loss_parallel.h"

#include <ATen/ops/scalar_tensor.h>

#include <limits>

namespace tessera::train {

struct TrainStep::State {
  ParallelModel& model;
  optim::AdamW& optimizer;
  optim::GradScaler scaler;
  int64_t accumulate;
  double clip;
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
    const auto loss = tessera::detail::full_tensor_or_self(models::loss_sum(model(inputs[i]), targets[i])) * scale;
    state.scaler.scale(loss).backward();
    total = total.defined() ? total + loss.detach() : loss.detach();
  }
  return total;
}

}  // namespace

TrainStep::TrainStep(const TrainConfig& config, ParallelModel& model, optim::AdamW& optimizer)
    : state_(new State{model, optimizer, optim::GradScaler({.enabled = config.training.precision == "fp16"}),
                       config.training.accumulate, config.optimizer.clip}) {
  std::visit(
      [&](auto& holder) {
        using Model = std::remove_reference_t<decltype(holder)>;
        const auto eager = [state = state_](Model& model, const at::Tensor& input, const at::Tensor& target,
                                            const at::Tensor& scale) {
          return accumulate_gradients<Model>(*state, model, input, target, scale);
        };
        const auto bind = [&](auto step) {
          run_ = [holder, step](const at::Tensor& input, const at::Tensor& target, const at::Tensor& scale) mutable {
            return step(holder, input, target, scale);
          };
        };
        if (config.training.compile)
          bind(compile(eager, {.captures = Captures::None}));  // nothing that it captures changes
        else
          bind(eager);
      },
      model.language_model());
}

TrainStep::~TrainStep() = default;

StepResult TrainStep::forward_backward(const at::Tensor& input, const at::Tensor& target, int64_t counted) {
  auto& [model, optimizer, scaler, accumulate, clip] = *state_;
  const double scale = static_cast<double>(model.data_ranks()) / static_cast<double>(counted);
  const auto loss = run_(input, target, at::scalar_tensor(scale, input.options().dtype(at::kFloat)));
  scaler.unscale_(optimizer);
  const double max_norm = clip > 0 ? clip : std::numeric_limits<double>::infinity();
  return {loss, optim::clip_grad_norm_(optimizer.parameters(), max_norm)};
}

void TrainStep::update() {
  auto& [model, optimizer, scaler, accumulate, clip] = *state_;
  scaler.step(optimizer);
  scaler.update();
}

void TrainStep::skip() { state_->scaler.update(); }

optim::GradScaler& TrainStep::scaler() { return state_->scaler; }

std::unique_ptr<optim::AdamW> make_optimizer(const OptimizerOptions& o, const torch::nn::Module& module) {
  const optim::AdamWOptions options{
      .lr = o.lr, .betas = {o.beta1, o.beta2}, .eps = o.eps, .weight_decay = o.weight_decay, .fused = true};
  auto without_decay = options;
  without_decay.weight_decay = 0;
  optim::AdamW::Group matrices{{}, options}, vectors{{}, without_decay};
  for (const auto& p : module.parameters()) (p.dim() > 1 ? matrices : vectors).params.push_back(p);
  return std::make_unique<optim::AdamW>(std::vector<optim::AdamW::Group>{matrices, vectors});
}

}  // namespace tessera::train
