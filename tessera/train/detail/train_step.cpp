#include "tessera/train/detail/train_step.h"

#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/loss.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/loss_parallel.h"

#include <ATen/ops/scalar_tensor.h>

#include <limits>

namespace tessera::train {

struct Step::Parts {
  Layout& layout;
  optim::AdamW& optimizer;
  optim::GradScaler scaler;
  int64_t accumulate;
  double clip;
};

namespace {

at::Tensor whole(const at::Tensor& t) { return is_dtensor(t) ? DTensor(t).full_tensor() : t; }

// Gradients of a batch, and its loss: the same text for both models, run as it is or compiled.
template <class Model>
at::Tensor gradients_of(Step::Parts& parts, Model& model, const at::Tensor& input, const at::Tensor& target,
                        const at::Tensor& scale) {
  model->zero_grad();
  at::Tensor total;
  const auto inputs = input.chunk(parts.accumulate), targets = target.chunk(parts.accumulate);
  for (size_t i = 0; i < inputs.size(); i++) {
    if (inputs.size() > 1) parts.layout.set_gradient_sync(i + 1 == inputs.size());
    const LossParallel keeps_logits_cut;
    const auto loss = whole(models::loss_sum(model(inputs[i]), targets[i])) * scale;
    parts.scaler.scale(loss).backward();
    total = total.defined() ? total + loss.detach() : loss.detach();
  }
  return total;
}

}  // namespace

Step::Step(const TrainConfig& config, Layout& layout, optim::AdamW& optimizer)
    : parts_(new Parts{layout, optimizer, optim::GradScaler({.enabled = config.training.precision == "fp16"}),
                       config.training.accumulate, config.optimizer.clip}) {
  std::visit(
      [&](auto& model) {
        using Model = std::remove_reference_t<decltype(model)>;
        const auto plain = [parts = parts_](Model& model, const at::Tensor& input, const at::Tensor& target,
                                            const at::Tensor& scale) {
          return gradients_of<Model>(*parts, model, input, target, scale);
        };
        const auto bind = [&](auto step) {
          run_ = [model, step](const at::Tensor& input, const at::Tensor& target, const at::Tensor& scale) mutable {
            return step(model, input, target, scale);
          };
        };
        if (config.training.compile)
          bind(compile(plain));
        else
          bind(plain);
      },
      layout.network());
}

Step::~Step() = default;

StepResult Step::forward_backward(const at::Tensor& input, const at::Tensor& target, int64_t counted) {
  auto& [layout, optimizer, scaler, accumulate, clip] = *parts_;
  const double scale = static_cast<double>(layout.data_ranks()) / static_cast<double>(counted);
  const auto loss = run_(input, target, at::scalar_tensor(scale, input.options().dtype(at::kFloat)));
  scaler.unscale_(optimizer);
  const double most = clip > 0 ? clip : std::numeric_limits<double>::infinity();
  return {loss, optim::clip_grad_norm_(optimizer.parameters(), most)};
}

void Step::update() {
  auto& [layout, optimizer, scaler, accumulate, clip] = *parts_;
  scaler.step(optimizer);
  scaler.update();
}

void Step::skip() { parts_->scaler.update(); }

optim::GradScaler& Step::scaler() { return parts_->scaler; }

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
