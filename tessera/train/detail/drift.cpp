#include "tessera/train/detail/drift.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/train/trainer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <iomanip>
#include <ostream>

namespace tessera::train {
namespace {

using tessera::detail::local_or_self;

constexpr double kUnit = 0x1p-24;  // half a unit in the last place of 1 in float32
constexpr double kOfProduct = 4;   // relative error of a product of the default, in units: measured, numerics.md
constexpr double kSafety = 4;      // the drift is that of one random sample of errors

double norm_of(const at::Tensor& t) {
  return tessera::detail::full_tensor_or_self(at::linalg_vector_norm(t)).item<double>();
}

// Adds or subtracts to each element that is not 0: `error` times the root mean square of its row, or times the element
// of a vector. The sign is a bit of the element, so it is equal on all replicas.
void add_errors(ParallelModel& model, double error) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : model.parameters()) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined() || local_or_self(gradient).numel() == 0) continue;
    auto local = local_or_self(gradient);
    const auto squares = local.mul(local);
    const auto scale = (local.dim() < 2 ? squares : squares.mean(-1, /*keepdim=*/true)).sqrt();
    const auto bits = local.contiguous().view(at::kInt);
    const auto signs = (bits.bitwise_xor(bits.bitwise_right_shift(5))).bitwise_and(1).mul(2).sub(1);
    local.add_(signs.mul(local.ne(0)).to(local.scalar_type()).mul(scale.mul(error)));
  }
}

// Norms of the difference of two models' parameters, and of the parameters of the first.
std::pair<double, double> distance(ParallelModel& a, ParallelModel& b) {
  const at::NoGradGuard no_grad;
  const auto left = a.counted_parameters(), right = b.counted_parameters();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < left.size(); i++) {
    difference += std::pow(norm_of(left[i].detach() - right[i].detach()), 2);
    norm += std::pow(norm_of(left[i].detach()), 2);
  }
  auto squares = at::tensor({difference, norm}, at::kDouble);
  a.sum_over_stages(squares);
  return {std::sqrt(squares[0].item<double>()), std::sqrt(squares[1].item<double>())};
}

int64_t matrices_of(const ParallelModel& model) {
  int64_t count = 0;
  for (const auto& p : model.module().parameters()) count += p.dim() > 1;
  return count;
}

}  // namespace

DriftReport measure_drift(const TrainConfig& config, const World& world, int64_t steps) {
  TESSERA_CHECK(config.training.numerics == "default", UsageError,
                "metrics.compare_numerics compares default numerics with invariant ones, and training.numerics is ",
                config.training.numerics, "; remove one of them");
  auto plain = config;
  plain.metrics = {.output = "", .tensorboard = false, .profile_step = 0};
  plain.checkpoint.every = 0;
  plain.checkpoint.folder = checkpoint_folder(config);  // of --resume auto
  auto invariant = plain;
  invariant.training.numerics = "invariant";
  Trainer a(plain, world), b(invariant, world), c(invariant, world);
  DriftReport report;
  report.rounding = kUnit * kOfProduct * std::sqrt(2.0 * static_cast<double>(matrices_of(a.model())));
  c.set_gradient_hook([&c, error = report.rounding] { add_errors(c.model(), error); });
  double weights_bound = 0;  // before the step, absolute
  for (int64_t i = 0; i < steps; i++) {
    const auto of_plain = a.step().metrics, of_invariant = b.step().metrics;
    c.step();
    DriftStep step{of_plain.step, of_plain.loss, of_invariant.loss};
    step.loss_bound = of_invariant.grad_norm * weights_bound + report.rounding * std::abs(of_invariant.loss);
    const auto [measured, norm] = distance(b.model(), a.model());
    weights_bound = kSafety * distance(b.model(), c.model()).first;
    step.weights = measured / norm;
    step.weights_bound = weights_bound / norm;
    report.steps.push_back(step);
  }
  return report;
}

std::ostream& operator<<(std::ostream& out, const DriftReport& report) {
  const auto flags = out.flags();
  const auto precision = out.precision();
  out << "default numerics beside invariant ones (assumed relative error of a gradient: " << std::setprecision(2)
      << std::scientific << report.rounding << ")\n"
      << "  step      loss   invariant     distance   predicted bound   weights, relative   predicted bound\n";
  for (const auto& s : report.steps)
    out << std::setw(6) << s.step << std::fixed << std::setprecision(6) << std::setw(10) << s.loss << std::setw(12)
        << s.invariant_loss << std::scientific << std::setprecision(2) << std::setw(13)
        << std::abs(s.loss - s.invariant_loss) << std::setw(18) << s.loss_bound << std::setw(20) << s.weights
        << std::setw(18) << s.weights_bound << '\n';
  out.flags(flags);
  out.precision(precision);
  return out;
}

}  // namespace tessera::train
