#include "tessera/optim/detail/substitute_optimizer.h"

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/state/detail/torch_optimizer_fields.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <cstring>
#include <typeindex>
#include <utility>

namespace tessera::optim::detail {
namespace {

using torch_fields::visit_fields;

template <class Torch, class TorchOptions, class State, class Own>
class SubstituteOf final : public Torch, public SubstituteOptimizer {
 public:
  explicit SubstituteOf(Torch& original)
      : Torch(std::vector<torch::optim::OptimizerParamGroup>{}, static_cast<TorchOptions&>(original.defaults())),
        original_(original),
        access_(access_to(original)) {}

  at::Tensor step(torch::optim::Optimizer::LossClosure closure) override { return own_->step(std::move(closure)); }

  torch::optim::Optimizer& as_torch() override { return *this; }
  Optimizer& own() override { return *own_; }

  void read_original() override {
    if (!has_same_parameters()) take_over_parameters();
    for (size_t g = 0; g < this->param_groups_.size(); g++) {
      options_of(*own_, g) = options_of(original_, g);
      options_of(*this, g) = options_of(original_, g);
    }
    for (auto& seen : seen_)
      if (!is_up_to_date(seen)) take_over_state(seen);
    generation_ = own_->generation();
  }

  void write_original() override {
    bool changed = false;
    for (size_t g = 0; g < this->param_groups_.size(); g++) {
      changed |= !(options_of(original_, g) == options_of(*this, g));
      options_of(original_, g) = options_of(*this, g);
    }
    const bool has_new_state = own_->generation() != generation_;
    for (auto& seen : seen_) {
      if (has_new_state) give_state(seen);
      if (seen.state && seen.step.defined())
        visit_fields(*seen.state, [&](const char*, auto& value, bool = true) {
          if constexpr (std::is_same_v<decltype(value), int64_t&>) value = steps_of(seen);
        });
    }
    TESSERA_CHECK(!changed, UsageError, "compile: the step changes the options of the torch::optim::", own_->kind(),
                  " that it was given, as a scheduler of torch::optim does. Its host code does not run again, and its ",
                  "own counters are not part of the program. Step the scheduler outside of the compiled step");
  }

 private:
  // The state of a parameter when both optimizers had the same.
  struct Seen {
    at::Tensor parameter;
    State* state = nullptr;  // of the original; null: none
    Tensors tensors = {};    // of `state`, in the order of its fields
    at::Tensor step = {};    // of the own optimizer, on the CPU
  };

  template <class AnyOptimizer>
  static TorchOptions& options_of(AnyOptimizer& optimizer, size_t group) {
    return static_cast<TorchOptions&>(optimizer.param_groups().at(group).options());
  }
  static int64_t steps_of(const Seen& seen) {
    return static_cast<int64_t>(*seen.step.template const_data_ptr<float>());
  }

  bool has_same_parameters() const {
    const auto& groups = original_.param_groups();
    const auto same_group = [](const auto& a, const auto& b) {
      const auto is_same = [](const at::Tensor& p, const at::Tensor& q) { return p.is_same(q); };
      return std::equal(a.params().begin(), a.params().end(), b.params().begin(), b.params().end(), is_same);
    };
    return own_ &&
           std::equal(groups.begin(), groups.end(), this->param_groups_.begin(), this->param_groups_.end(), same_group);
  }
  void take_over_parameters() {
    std::vector<typename Own::Group> groups;
    seen_.clear();
    this->param_groups_.clear();
    for (const auto& params : access_->groups()) {
      groups.push_back({params, {}});
      this->param_groups_.emplace_back(params, make_group_options(typename Own::Options()));
      for (const auto& p : params) seen_.push_back({p});
    }
    own_ = std::make_unique<Own>(groups);
  }

  State* state_of(const at::Tensor& parameter) const {
    const auto found = original_.state().find(parameter.unsafeGetTensorImpl());
    return found == original_.state().end() ? nullptr : static_cast<State*>(found->second.get());
  }

  bool is_up_to_date(const Seen& seen) const {
    auto* state = state_of(seen.parameter);
    if (!state || state != seen.state) return state == seen.state;
    bool same = true;
    size_t t = 0;
    visit_fields(*state, [&](const char*, auto& value, bool = true) {
      if constexpr (std::is_same_v<decltype(value), int64_t&>)
        same &= value == steps_of(seen);
      else
        same &= value.is_same(seen.tensors[t++]);
    });
    return same;
  }

  // Copies the state of the original, as aliases.
  void take_over_state(Seen& seen) {
    own_->set_state(seen.parameter, access_->state(seen.parameter));
    note(seen);
  }
  // The original gets the state of the own optimizer, as aliases.
  void give_state(Seen& seen) {
    auto state = own_->state(seen.parameter);
    if (!state.empty()) access_->set_state(seen.parameter, std::move(state));
    note(seen);
  }
  void note(Seen& seen) {
    seen.state = state_of(seen.parameter);
    seen.tensors.clear();
    seen.step.reset();
    if (!seen.state) return;
    visit_fields(*seen.state, [&](const char*, auto& value, bool = true) {
      if constexpr (std::is_same_v<decltype(value), at::Tensor&>) seen.tensors.push_back(value);
    });
    const auto state = own_->state(seen.parameter);
    if (const auto* step = state.find("step")) seen.step = *step;
  }

  Torch& original_;
  std::shared_ptr<OptimizerAccess> access_;
  std::unique_ptr<Own> own_;
  std::vector<Seen> seen_;
  uint64_t generation_ = 0;  // of own_ before the call
};

template <class Torch, class TorchOptions, class State, class Own>
std::unique_ptr<SubstituteOptimizer> substitute_if(torch::optim::Optimizer& optimizer) {
  if (typeid(optimizer) != typeid(Torch)) return nullptr;  // a class derived from it may do other steps
  return std::make_unique<SubstituteOf<Torch, TorchOptions, State, Own>>(static_cast<Torch&>(optimizer));
}

namespace to = torch::optim;
constexpr std::unique_ptr<SubstituteOptimizer> (*kSubstitutes[])(torch::optim::Optimizer&) = {
    substitute_if<to::Adagrad, to::AdagradOptions, to::AdagradParamState, Adagrad>,
    substitute_if<to::Adam, to::AdamOptions, to::AdamParamState, Adam>,
    substitute_if<to::AdamW, to::AdamWOptions, to::AdamWParamState, AdamW>,
    substitute_if<to::RMSprop, to::RMSpropOptions, to::RMSpropParamState, RMSprop>,
    substitute_if<to::SGD, to::SGDOptions, to::SGDParamState, SGD>,
};

}  // namespace

std::unique_ptr<SubstituteOptimizer> make_substitute(torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<OptimizerAccess*>(&optimizer)) return nullptr;
  for (const auto& make : kSubstitutes)
    if (auto made = make(optimizer)) return made;
  TESSERA_FAIL(UsageError, SubstituteOptimizers::reason_against(optimizer));
}

std::string SubstituteOptimizers::reason_against(torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<OptimizerAccess*>(&optimizer)) return "";
  for (const auto* known :
       {&typeid(to::Adagrad), &typeid(to::Adam), &typeid(to::AdamW), &typeid(to::RMSprop), &typeid(to::SGD)})
    if (typeid(optimizer) == *known) return "";
  if (dynamic_cast<to::LBFGS*>(&optimizer))
    return "compile: torch::optim::LBFGS evaluates its closure as often as the losses ask for, which a program cannot. "
           "Compile the forward and backward of the closure, and step the optimizer outside of it";
  return c10::str("compile: an optimizer of class ", c10::demangle(typeid(optimizer).name()),
                  " keeps state on the host, which would become a constant of the program. A compiled step takes SGD, ",
                  "Adam, AdamW, RMSprop and Adagrad of torch::optim and tessera::optim, and classes that implement ",
                  "tessera::OptimizerAccess; step others outside of it");
}

torch::optim::Optimizer& SubstituteOptimizers::of(torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<OptimizerAccess*>(&optimizer)) return optimizer;
  auto& [type, substitute] = all_[&optimizer];
  if (type != std::type_index(typeid(optimizer))) {
    substitute = make_substitute(optimizer);
    type = typeid(optimizer);
  }
  substitute->read_original();
  in_call_.push_back(substitute.get());
  return substitute->as_torch();
}

void SubstituteOptimizers::start_call() {
  in_call_.clear();
  own_of_captured_.clear();
  for (auto* optimizer : captured_) {
    of(*optimizer);
    own_of_captured_.push_back(&in_call_.back()->own());
  }
}

void SubstituteOptimizers::write_back() {
  for (auto* substitute : in_call_) substitute->write_original();
  in_call_.clear();
}

std::optional<at::Tensor> SubstituteOptimizers::Captured::step(torch::optim::Optimizer& optimizer,
                                                               torch::optim::Optimizer::LossClosure& closure) {
  auto& captured = substitutes_.captured_;
  const auto found = std::find(captured.begin(), captured.end(), &optimizer);
  if (found != captured.end())
    return substitutes_.own_of_captured_.at(static_cast<size_t>(found - captured.begin()))->step(std::move(closure));
  if (!compiling()) return {};
  const auto reason = reason_against(optimizer);
  TESSERA_CHECK(reason.empty(), UsageError, reason);
  TESSERA_CHECK(closure_has(&optimizer), UsageError, "compile: the step reaches a torch::optim::",
                c10::demangle(typeid(optimizer).name()).substr(std::string_view("torch::optim::").size()),
                " through a pointer, so another optimizer can take its place unseen, and its step counts are on the "
                "host. Pass it as an argument, or capture it by reference or by a shared_ptr");
  captured.push_back(&optimizer);
  throw FoundCapturedOptimizer();
}

SubstituteOptimizers::Captured::Captured(SubstituteOptimizers& substitutes, const void* closure, size_t bytes)
    : substitutes_(substitutes), closure_(static_cast<const char*>(closure)), bytes_(bytes) {
  std::erase_if(substitutes_.captured_, [this](const auto* optimizer) { return !closure_has(optimizer); });
}

bool SubstituteOptimizers::Captured::closure_has(const torch::optim::Optimizer* optimizer) const {
  const void* address = optimizer;
  for (size_t at = 0; at + sizeof(address) <= bytes_; at += sizeof(address))
    if (std::memcmp(closure_ + at, static_cast<const void*>(&address), sizeof(address)) == 0) return true;
  return false;
}

}  // namespace tessera::optim::detail
