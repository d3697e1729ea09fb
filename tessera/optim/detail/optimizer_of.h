#pragma once
#include "tessera/base/error.h"
#include "tessera/optim/detail/option_dict.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/tracing/detail/runtime_scalar.h"

#include <bit>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::optim {

// An optimizer whose parameter groups have Options. It stores and checks them and selects the implementation (foreach,
// fused or one by one). Derived classes add the state of a parameter and the update formulas.
//
// Options is a struct that has
//   kKind           the optimizer's name
//   lr              a LearningRate
//   foreach, fused
//   check()         throws UsageError for values out of range
//   visit(o, f)     calls f(name, value) for each option that is saved (foreach and fused are not)
template <class Options_>
class OptimizerOf : public Optimizer {
 public:
  using Options = Options_;
  using Group = ParamGroup<Options>;

  // One group.
  explicit OptimizerOf(const Tensors& params, const Options& options = {})
      : OptimizerOf(std::vector<Group>{{params, options}}) {}
  // Several groups, each with its own options.
  explicit OptimizerOf(const std::vector<Group>& groups) {
    TESSERA_CHECK(!groups.empty(), UsageError, kind(), ": no parameter groups were given");
    for (const auto& group : groups) add_param_group(group);
  }

  // Adds a group. If it throws UsageError, nothing has changed.
  void add_param_group(const Group& group) {
    group.options.check();
    add_group(group.params);
    options_.push_back(group.options);
    changed();
  }
  // The options of a group. In a step that is being compiled: another value, of the learning rate too, recompiles it.
  const Options& group_options(size_t group) const {
    if (compiling()) {
      CompilingScope::add_guard([this] { return static_cast<int64_t>(generation()); });
      guard_lr(group);
    }
    return options_.at(group);
  }
  // Replaces the options of a group.
  void set_group_options(size_t group, const Options& options) {
    options.check();
    options_.at(group) = options;
    changed();
  }

  // See Optimizer and OptimizerAccess.
  double lr(size_t group) const override {
    if (compiling()) guard_lr(group);
    return options_.at(group).lr.number();
  }
  void set_lr(size_t group, double lr) override {
    if (compiling()) set_lr_in_trace(group);
    options_.at(group).lr.set(lr);
  }
  bool is_fused(size_t group) const override { return options_.at(group).fused; }
  std::string kind() const override { return Options::kKind; }

  // The saved options of a group, as tensors.
  StateDict options(size_t group) const override {
    StateDict dict;
    Options::visit(options_.at(group), detail::WriteOptions{dict});
    return dict;
  }
  // Throws UsageError for values that set_options would reject.
  void check_options(size_t group, const StateDict& dict) const override { read(group, dict); }
  // Sets the options of a group from a dict.
  void set_options(size_t group, const StateDict& dict) override {
    auto options = read(group, dict);
    const double lr = options.lr.number();
    options.lr = options_[group].lr;  // a tensor learning rate stays the same tensor
    options.lr.set(lr);
    options_[group] = std::move(options);
    changed();
  }

 protected:
  // Updates the lists with foreach ops. Lists of one parameter give bitwise equal results.
  virtual void update_foreach(const Options& options, TensorLists& lists) const = 0;
  // Updates the lists with a fused kernel.
  virtual void update_fused(const Options& options, TensorLists& lists, const Scaling* scaling) const = 0;

  // group_options() for the optimizer itself, which needs no guard: it reads the learning rate in each run.
  const Options& options_of(size_t group) const { return options_.at(group); }

 private:
  void update(size_t group, TensorLists& lists, const Scaling* scaling) override {
    if (!compiling()) return update(options_[group], lists, scaling);
    auto options = options_[group];
    // A learning rate that the step has set itself is a constant of the program.
    if (!options.lr.is_tensor() && !lr_is_set_in_trace(group))
      options.lr = runtime_scalar("lr", [this, group] { return lr(group); });
    update(options, lists, scaling);
  }

  void guard_lr(size_t group) const {
    if (options_.at(group).lr.is_tensor()) return;  // reading it is an error of its own
    CompilingScope::add_guard([this, group] { return std::bit_cast<int64_t>(options_.at(group).lr.number()); });
  }
  bool lr_is_set_in_trace(size_t group) const {
    const auto found = lr_set_in_trace_.find(group);
    return found != lr_set_in_trace_.end() && found->second == CompilingScope::serial();
  }
  // The number is host state: it is restored after the trace and set again after each run. A tensor is written by an
  // op.
  void set_lr_in_trace(size_t group) {
    if (options_.at(group).lr.is_tensor() || lr_is_set_in_trace(group)) return;
    lr_set_in_trace_[group] = CompilingScope::serial();
    CompilingScope::on_trace_end([this, group, before = options_.at(group).lr.number()](bool finished) {
      const double last = options_.at(group).lr.number();
      options_.at(group).lr.set(before);
      if (finished) CompilingScope::on_replay([this, group, last] { options_.at(group).lr.set(last); });
    });
  }
  void update(const Options& o, TensorLists& lists, const Scaling* scaling) {
    if (o.fused || scaling) return update_fused(o, lists, scaling);
    if (o.foreach.value_or(true)) return update_foreach(o, lists);
    for (size_t i = 0; i < lists.parameters.size(); i++) {
      auto one = lists.only(i);
      update_foreach(o, one);
    }
  }

  // The group's options, overwritten by those of `dict` and checked. Does not write to a tensor learning rate.
  Options read(size_t group, const StateDict& dict) const {
    auto options = options_.at(group);
    options.lr = options.lr.number();
    Options::visit(options, detail::ReadOptions{dict});
    options.check();
    return options;
  }

  std::vector<Options> options_;
  std::map<size_t, size_t> lr_set_in_trace_;  // group -> CompilingScope::serial() of the trace
};

}  // namespace tessera::optim
