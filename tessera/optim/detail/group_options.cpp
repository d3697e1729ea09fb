#include "tessera/optim/detail/group_options.h"

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <array>
#include <bit>
#include <tuple>

namespace tessera::optim::detail {
namespace {

// Calls f(LibTorch's field, our field) for each option that both have, except lr.
template <class Torch, class Ours, class F>
void visit_adam_fields(Torch& t, Ours& o, F f) {
  f(t.betas(), o.betas);
  f(t.eps(), o.eps);
  f(t.weight_decay(), o.weight_decay);
  f(t.amsgrad(), o.amsgrad);
}
template <class F>
void visit_fields(torch::optim::AdamOptions& t, AdamOptions& o, F f) {
  visit_adam_fields(t, o, f);
}
template <class F>
void visit_fields(torch::optim::AdamWOptions& t, AdamWOptions& o, F f) {
  visit_adam_fields(t, o, f);
}
template <class F>
void visit_fields(torch::optim::SGDOptions& t, SGDOptions& o, F f) {
  f(t.momentum(), o.momentum);
  f(t.dampening(), o.dampening);
  f(t.weight_decay(), o.weight_decay);
  f(t.nesterov(), o.nesterov);
}
template <class F>
void visit_fields(torch::optim::RMSpropOptions& t, RMSpropOptions& o, F f) {
  f(t.alpha(), o.alpha);
  f(t.eps(), o.eps);
  f(t.weight_decay(), o.weight_decay);
  f(t.momentum(), o.momentum);
  f(t.centered(), o.centered);
}
template <class F>
void visit_fields(torch::optim::AdagradOptions& t, AdagradOptions& o, F f) {
  f(t.lr_decay(), o.lr_decay);
  f(t.weight_decay(), o.weight_decay);
  f(t.initial_accumulator_value(), o.initial_accumulator_value);
  f(t.eps(), o.eps);
}

template <class T>
T convert(const T& value) {
  return value;
}
std::array<double, 2> convert(const std::tuple<double, double>& betas) {
  return {std::get<0>(betas), std::get<1>(betas)};
}
std::tuple<double, double> convert(const std::array<double, 2>& betas) { return {betas[0], betas[1]}; }

template <class Ours, class Torch>
class TorchGroupOptions final : public Torch, public GroupOptions<Ours> {
 public:
  explicit TorchGroupOptions(const Ours& options) : Torch(0.0), GroupOptions<Ours>(options) { show(); }

  double get_lr() const override {
    if (compiling() && !this->get().lr.is_tensor())
      CompilingScope::add_guard([this] { return std::bit_cast<int64_t>(this->get().lr.number()); });
    return this->get().lr.number();
  }
  void set_lr(const double lr) override {
    TESSERA_CHECK(!compiling(), UsageError, Ours::kKind,
                  ": a compiled step sets the learning rate through torch::optim::OptimizerOptions, as a scheduler of "
                  "torch::optim does. Its own counters are not part of the program. Step the scheduler outside of the "
                  "compiled step, or use the scheduler of that name in tessera::optim");
    this->set_lr_number(lr);
  }
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<TorchGroupOptions>(*this);
  }

 private:
  void take_over() const override {
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): LibTorch's accessors return references
    auto& fields = const_cast<TorchGroupOptions&>(*this);
    Ours next = this->value_;
    bool written = false;
    visit_fields(fields, next, [&](auto& theirs, auto& ours) {
      const auto value = convert(theirs);
      if (ours == value) return;
      ours = value;
      written = true;
    });
    if (written) {
      next.check();
      this->value_ = std::move(next);
      this->writes_++;
    }
    if (fields.lr() != shown_lr_) {
      shown_lr_ = fields.lr();
      this->value_.lr.set(shown_lr_);
    }
  }
  // A tensor is not shown: reading it may copy from a device.
  void show() override {
    visit_fields(*this, this->value_, [](auto& theirs, const auto& ours) { theirs = convert(ours); });
    if (!this->value_.lr.is_tensor()) this->lr(this->value_.lr.number());
    shown_lr_ = this->lr();
  }

  mutable double shown_lr_ = 0;
};

template <class Torch, class Ours>
std::unique_ptr<torch::optim::OptimizerOptions> make(const Ours& options) {
  return std::make_unique<TorchGroupOptions<Ours, Torch>>(options);
}

}  // namespace

std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const AdagradOptions& options) {
  return make<torch::optim::AdagradOptions>(options);
}
std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const AdamOptions& options) {
  return make<torch::optim::AdamOptions>(options);
}
std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const AdamWOptions& options) {
  return make<torch::optim::AdamWOptions>(options);
}
std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const RMSpropOptions& options) {
  return make<torch::optim::RMSpropOptions>(options);
}
std::unique_ptr<torch::optim::OptimizerOptions> make_group_options(const SGDOptions& options) {
  return make<torch::optim::SGDOptions>(options);
}

}  // namespace tessera::optim::detail
