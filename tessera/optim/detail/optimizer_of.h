#pragma once
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/base/error.h"
#include "tessera/tracing/detail/live_number.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/detail/option_dict.h"

#include <string>
#include <utility>
#include <vector>

namespace tessera::optim {

// An optimizer whose groups have Options: it keeps them, checks them wherever they come from, and picks the
// implementation they ask for. What is left to write is the state of a parameter and the arithmetic.
//
// Options is a struct of numbers that has
//   kKind           the optimizer's name
//   lr              a LearningRate
//   foreach, fused
//   check()         UsageError for values out of range
//   visit(o, f)     f(name, value) for each that is saved. How it is computed (foreach, fused) is not.
template <class Options_>
class OptimizerOf : public Optimizer {
 public:
  using Options = Options_;
  using Group = ParamGroup<Options>;

  explicit OptimizerOf(const Tensors& params, const Options& options = {})
      : OptimizerOf(std::vector<Group>{{params, options}}) {}
  explicit OptimizerOf(const std::vector<Group>& groups) {
    TESSERA_CHECK(!groups.empty(), UsageError, kind(), ": no parameter groups were given");
    for (const auto& group : groups) add_param_group(group);
  }

  void add_param_group(const Group& group) {  // UsageError leaves it as it was
    group.options.check();
    add_group(group.params);
    options_.push_back(group.options);
    changed();
  }
  const Options& group_options(size_t group) const { return options_.at(group); }
  void set_group_options(size_t group, const Options& options) {
    options.check();
    options_.at(group) = options;
    changed();
  }

  double lr(size_t group) const override { return options_.at(group).lr.number(); }
  void set_lr(size_t group, double lr) override { options_.at(group).lr.set(lr); }
  bool is_fused(size_t group) const override { return options_.at(group).fused; }
  std::string kind() const override { return Options::kKind; }

  StateDict options(size_t group) const override {
    StateDict dict;
    Options::visit(options_.at(group), detail::WriteOptions{dict});
    return dict;
  }
  void check_options(size_t group, const StateDict& dict) const override { read(group, dict); }
  void set_options(size_t group, const StateDict& dict) override {
    auto options = read(group, dict);
    const double lr = options.lr.number();
    options.lr = options_[group].lr;  // one that is a tensor stays that tensor
    options.lr.set(lr);
    options_[group] = std::move(options);
    changed();
  }

 protected:
  // The same arithmetic for one parameter as for many.
  virtual void update_list(const Options& options, Bundle& bundle) const = 0;
  virtual void update_fused(const Options& options, Bundle& bundle, const Scaling* scaling) const = 0;

 private:
  void update(size_t group, Bundle& bundle, const Scaling* scaling) override {
    if (!compiling()) return update(options_[group], bundle, scaling);
    auto options = options_[group];
    if (!options.lr.is_tensor()) options.lr = live_number("lr", [this, group] { return lr(group); });
    update(options, bundle, scaling);
  }
  void update(const Options& o, Bundle& bundle, const Scaling* scaling) {
    if (o.fused || scaling) return update_fused(o, bundle, scaling);
    if (o.foreach.value_or(true)) return update_list(o, bundle);
    for (size_t i = 0; i < bundle.parameters.size(); i++) {
      auto one = bundle.only(i);
      update_list(o, one);
    }
  }

  // The group's options with those of `dict` in their place, checked. Nothing is written: not to a tensor either.
  Options read(size_t group, const StateDict& dict) const {
    auto options = options_.at(group);
    options.lr = options.lr.number();
    Options::visit(options, detail::ReadOptions{dict});
    options.check();
    return options;
  }

  std::vector<Options> options_;
};

}  // namespace tessera::optim
