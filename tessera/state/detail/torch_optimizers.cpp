#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/state/detail/torch_optimizer_fields.h"
#include "tessera/state/optimizer_state.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/lbfgs.h>

#include <deque>
#include <memory>
#include <tuple>

// Implements OptimizerAccess for LibTorch's optimizers. visit_fields lists the fields of each class once. Reading,
// writing and state_entries() use it.
namespace tessera {
namespace {

namespace optim = torch::optim;
using torch_fields::visit_fields;
using Betas = std::tuple<double, double>;

at::Tensor to_tensor(double v) { return at::scalar_tensor(v, at::kDouble); }
at::Tensor to_tensor(int64_t v) { return at::scalar_tensor(v, at::kLong); }
at::Tensor to_tensor(bool v) { return at::scalar_tensor(v, at::kBool); }
at::Tensor to_tensor(const Betas& v) { return at::tensor({std::get<0>(v), std::get<1>(v)}, at::kDouble); }
at::Tensor to_tensor(const at::Tensor& v) { return v.defined() ? v.detach() : v; }

void from_tensor(const at::Tensor& t, double& v) { v = t.item<double>(); }
void from_tensor(const at::Tensor& t, int64_t& v) { v = t.item<int64_t>(); }
void from_tensor(const at::Tensor& t, bool& v) { v = t.item<bool>(); }
void from_tensor(const at::Tensor& t, Betas& v) { v = {t[0].item<double>(), t[1].item<double>()}; }
void from_tensor(const at::Tensor& t, at::Tensor& v) { v = t; }

template <class Fields>
StateDict read(Fields& fields) {
  StateDict dict;
  visit_fields(fields, [&](const char* name, auto& value, bool = true) {
    const auto tensor = to_tensor(value);
    if (tensor.defined()) dict.insert(name, tensor);
  });
  return dict;
}
template <class Fields>
void write(Fields& fields, const StateDict& dict) {
  visit_fields(fields, [&](const char* name, auto& value, bool = true) {
    if (const at::Tensor* tensor = dict.find(name)) from_tensor(*tensor, value);
  });
}

template <class Optimizer, class Options, class State>
class TorchOptimizer final : public OptimizerAccess {
 public:
  TorchOptimizer(const char* kind, Optimizer& optimizer) : kind_(kind), optimizer_(optimizer) {}

  std::string kind() const override { return kind_; }
  std::vector<std::vector<at::Tensor>> groups() const override {
    std::vector<std::vector<at::Tensor>> groups;
    for (const auto& group : optimizer_.param_groups()) groups.push_back(group.params());
    return groups;
  }
  StateDict options(size_t group) const override { return read(options_of(group)); }
  void set_options(size_t group, const StateDict& options) override { write(options_of(group), options); }

  std::vector<StateEntry> state_entries() const override {
    State state;
    std::vector<StateEntry> entries;
    visit_fields(state, [&](const char* name, auto& value, bool required = true) {
      entries.push_back({name, std::is_same_v<decltype(value), at::Tensor&>, required});
    });
    return entries;
  }
  bool has_state_before_first_step() const override { return std::is_same_v<Optimizer, optim::Adagrad>; }

  StateDict state(const at::Tensor& parameter) const override {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer_.state().end() || !found->second) return {};
    return read(static_cast<State&>(*found->second));
  }
  void set_state(const at::Tensor& parameter, StateDict dict) override {
    if (dict.empty()) {
      optimizer_.state().erase(parameter.unsafeGetTensorImpl());
      return;
    }
    auto state = std::make_unique<State>();
    write(*state, dict);
    optimizer_.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }

 private:
  Options& options_of(size_t group) const {
    return static_cast<Options&>(optimizer_.param_groups().at(group).options());
  }
  const char* kind_;
  Optimizer& optimizer_;
};

// LBFGS has one state for all parameters, under the first one: flat vectors of all elements, in the order of the
// parameters. With distributed parameters these are replicated DTensors; the dict has them as plain tensors.
class LBFGSAccess final : public OptimizerAccess {
 public:
  explicit LBFGSAccess(optim::LBFGS& optimizer) : optimizer_(optimizer) {}

  std::string kind() const override { return "LBFGS"; }
  std::vector<std::vector<at::Tensor>> groups() const override { return {optimizer_.param_groups()[0].params()}; }
  StateDict options(size_t) const override {
    StateDict dict;
    visit_options([&](const char* name, auto& value) { dict.insert(name, to_tensor(value)); });
    return dict;
  }
  void set_options(size_t, const StateDict& dict) override {
    visit_options([&](const char* name, auto& value) {
      if (const at::Tensor* tensor = dict.find(name)) from_tensor(*tensor, value);
    });
  }
  std::vector<StateEntry> state_entries() const override {
    std::vector<StateEntry> entries;
    for (const char* name : {"func_evals", "n_iter", "t", "prev_loss"}) entries.push_back({name, false, true});
    for (const char* name : {"d", "H_diag", "prev_flat_grad", "old_dirs", "old_stps", "ro"})
      entries.push_back({name, false, false});
    return entries;
  }
  StateDict state(const at::Tensor& parameter) const override {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer_.state().end() || !found->second) return {};
    auto& state = static_cast<optim::LBFGSParamState&>(*found->second);
    StateDict dict{{"func_evals", to_tensor(state.func_evals())},
                   {"n_iter", to_tensor(state.n_iter())},
                   {"t", to_tensor(state.t())},
                   {"prev_loss", to_tensor(state.prev_loss())}};
    visit_vectors(state, [&](const char* name, const at::Tensor& value) {
      if (value.defined()) dict.insert(name, plain(value));
    });
    visit_histories(state, [&](const char* name, const std::deque<at::Tensor>& history) {
      std::vector<at::Tensor> entries;
      for (const auto& entry : history) entries.push_back(plain(entry));
      if (!entries.empty()) dict.insert(name, at::stack(entries));
    });
    return dict;
  }
  void set_state(const at::Tensor& parameter, StateDict dict) override {
    optimizer_.state().erase(parameter.unsafeGetTensorImpl());
    if (dict.empty()) return;
    TESSERA_CHECK(
        parameter.is_same(optimizer_.param_groups()[0].params()[0]), UsageError,
        "the state of LBFGS belongs to all parameters together, and is saved under the first one: load it into "
        "an LBFGS with the same parameters in the same order");
    auto state = std::make_unique<optim::LBFGSParamState>();
    from_tensor(dict.at("func_evals"), state->func_evals());
    from_tensor(dict.at("n_iter"), state->n_iter());
    from_tensor(dict.at("t"), state->t());
    from_tensor(dict.at("prev_loss"), state->prev_loss());
    visit_vectors(*state, [&](const char* name, at::Tensor& value) {
      if (const at::Tensor* found = dict.find(name)) value = like(parameter, *found);
    });
    visit_histories(*state, [&](const char* name, std::deque<at::Tensor>& history) {
      if (const at::Tensor* found = dict.find(name))
        for (const auto& entry : found->unbind()) history.push_back(like(parameter, entry.clone()));
    });
    optimizer_.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }

 private:
  template <class F>
  void visit_options(F f) const {
    auto& o = static_cast<optim::LBFGSOptions&>(optimizer_.param_groups()[0].options());
    f("lr", o.lr());
    f("max_iter", o.max_iter());
    f("tolerance_grad", o.tolerance_grad());
    f("tolerance_change", o.tolerance_change());
    f("history_size", o.history_size());
  }
  template <class State, class F>
  static void visit_vectors(State& state, F f) {
    f("d", state.d());
    f("H_diag", state.H_diag());
    f("prev_flat_grad", state.prev_flat_grad());
  }
  template <class State, class F>
  static void visit_histories(State& state, F f) {
    f("old_dirs", state.old_dirs());
    f("old_stps", state.old_stps());
    f("ro", state.ro());
  }
  static at::Tensor plain(const at::Tensor& t) {
    return is_dtensor(t) ? DTensor(t.detach()).full_tensor() : t.detach();
  }
  static at::Tensor like(const at::Tensor& parameter, const at::Tensor& value) {
    if (!is_dtensor(parameter)) return value.to(parameter.device());
    const auto mesh = DTensor(parameter).device_mesh();
    const auto local = value.to(detail::local_or_self(parameter).device());
    return DTensor::from_local(local, mesh, Placements(static_cast<size_t>(mesh.ndim()), Replicate()));
  }
  optim::LBFGS& optimizer_;
};
std::shared_ptr<OptimizerAccess> access_if_lbfgs(const char*, optim::Optimizer& optimizer) {
  auto* known = dynamic_cast<optim::LBFGS*>(&optimizer);
  return known ? std::make_shared<LBFGSAccess>(*known) : nullptr;
}

template <class Optimizer, class Options, class State>
std::shared_ptr<OptimizerAccess> access_if(const char* kind, optim::Optimizer& optimizer) {
  auto* known = dynamic_cast<Optimizer*>(&optimizer);
  return known ? std::make_unique<TorchOptimizer<Optimizer, Options, State>>(kind, *known) : nullptr;
}

struct KnownOptimizer {
  const char* kind;
  std::shared_ptr<OptimizerAccess> (*access_if)(const char* kind, optim::Optimizer& optimizer);
};
constexpr KnownOptimizer kKnownOptimizers[] = {
    {"Adagrad", access_if<optim::Adagrad, optim::AdagradOptions, optim::AdagradParamState>},
    {"Adam", access_if<optim::Adam, optim::AdamOptions, optim::AdamParamState>},
    {"AdamW", access_if<optim::AdamW, optim::AdamWOptions, optim::AdamWParamState>},
    {"LBFGS", access_if_lbfgs},
    {"RMSprop", access_if<optim::RMSprop, optim::RMSpropOptions, optim::RMSpropParamState>},
    {"SGD", access_if<optim::SGD, optim::SGDOptions, optim::SGDParamState>},
};

}  // namespace

std::shared_ptr<OptimizerAccess> access_to(optim::Optimizer& optimizer) {
  if (auto* own = dynamic_cast<OptimizerAccess*>(&optimizer)) return {std::shared_ptr<void>(), own};  // not an owner
  std::string kinds;
  for (const auto& known : kKnownOptimizers) {
    if (auto access = known.access_if(known.kind, optimizer)) return access;
    kinds += c10::str(kinds.empty() ? "" : ", ", known.kind);
  }
  TESSERA_FAIL(UsageError, "the state of this optimizer is unknown. Supported LibTorch optimizers are ", kinds,
               "; another optimizer can implement tessera::OptimizerAccess.");
}

}  // namespace tessera
