#pragma once
#include "tessera/base/error.h"
#include "tessera/optim/detail/group_options.h"
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
      : Optimizer(detail::make_group_options(options)) {
    add_param_group({params, options});
  }
  // Several groups, each with its own options.
  explicit OptimizerOf(const std::vector<Group>& groups) : Optimizer(detail::make_group_options(Options())) {
    TESSERA_CHECK(!groups.empty(), UsageError, kind(), ": no parameter groups were given");
    for (const auto& group : groups) add_param_group(group);
  }

  // Adds a group. If it throws UsageError, nothing has changed.
  void add_param_group(const Group& group) {
    group.options.check();
    add_group(group.params, detail::make_group_options(group.options));
    changed();
  }
  // The options of a group. In a step that is being compiled: another value, of the learning rate too, recompiles it.
  const Options& group_options(size_t group) const {
    if (compiling()) {
      CompilingScope::add_guard([this] { return static_cast<int64_t>(generation()); });
      guard_lr(group);
    }
    return options_of(group);
  }
  // Replaces the options of a group.
  void set_group_options(size_t group, const Options& options) {
    options.check();
    group_of(group).set(options);
    changed();
  }

  // See Optimizer and OptimizerAccess.
  double lr(size_t group) const override {
    if (compiling()) guard_lr(group);
    return options_of(group).lr.number();
  }
  void set_lr(size_t group, double lr) override {
    if (compiling()) set_lr_in_trace(group);
    group_of(group).set_lr_number(lr);
  }
  bool is_fused(size_t group) const override { return options_of(group).fused; }
  std::string kind() const override { return Options::kKind; }

  // The saved options of a group, as tensors.
  StateDict options(size_t group) const override {
    StateDict dict;
    Options::visit(options_of(group), detail::WriteOptions{dict});
    return dict;
  }
  // Throws UsageError for values that set_options would reject.
  void check_options(size_t group, const StateDict& dict) const override { read(group, dict); }
  // Sets the options of a group from a dict.
  void set_options(size_t group, const StateDict& dict) override {
    auto options = read(group, dict);
    const double lr = options.lr.number();
    options.lr = options_of(group).lr;  // a tensor learning rate stays the same tensor
    options.lr.set(lr);
    group_of(group).set(std::move(options));
    changed();
  }

 protected:
  // Updates the lists with foreach ops. Lists of one parameter give bitwise equal results.
  virtual void update_foreach(const Options& options, TensorLists& lists) const = 0;
  // Updates the lists with a fused kernel.
  virtual void update_fused(const Options& options, TensorLists& lists, const Scaling* scaling) const = 0;

  // group_options() for the optimizer itself, which needs no guard: it reads the learning rate in each run.
  const Options& options_of(size_t group) const { return group_of(group).get(); }

 private:
  detail::GroupOptions<Options>& group_of(size_t group) const {
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): LibTorch's accessor is const for const groups
    auto& options = const_cast<torch::optim::OptimizerOptions&>(param_groups_.at(group).options());
    auto* own = dynamic_cast<detail::GroupOptions<Options>*>(&options);
    TESSERA_CHECK(own, UsageError, kind(), ": group ", group,
                  " has options of another optimizer; pass options of this one, or none, to add_param_group()");
    return *own;
  }
  uint64_t option_writes(size_t group) const override { return group_of(group).writes(); }

  void update(size_t group, TensorLists& lists, const Scaling* scaling) override {
    if (!compiling()) return update(options_of(group), lists, scaling);
    auto options = options_of(group);
    // A learning rate that the step has set itself is a constant of the program.
    if (!options.lr.is_tensor() && !lr_is_set_in_trace(group))
      options.lr = runtime_scalar("lr", [this, group] { return lr(group); });
    update(options, lists, scaling);
  }

  void guard_lr(size_t group) const {
    if (options_of(group).lr.is_tensor()) return;  // reading it is an error of its own
    CompilingScope::add_guard([this, group] { return std::bit_cast<int64_t>(options_of(group).lr.number()); });
  }
  bool lr_is_set_in_trace(size_t group) const {
    const auto found = lr_set_in_trace_.find(group);
    return found != lr_set_in_trace_.end() && found->second == CompilingScope::serial();
  }
  // The number is host state: it is restored after the trace and set again after each run. A tensor is written by an
  // op.
  void set_lr_in_trace(size_t group) {
    if (options_of(group).lr.is_tensor() || lr_is_set_in_trace(group)) return;
    lr_set_in_trace_[group] = CompilingScope::serial();
    CompilingScope::on_trace_end([this, group, before = options_of(group).lr.number()](bool finished) {
      const double last = options_of(group).lr.number();
      group_of(group).set_lr_number(before);
      if (finished) CompilingScope::on_replay([this, group, last] { group_of(group).set_lr_number(last); });
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
    auto options = options_of(group);
    options.lr = options.lr.number();
    Options::visit(options, detail::ReadOptions{dict});
    options.check();
    return options;
  }

  std::map<size_t, size_t> lr_set_in_trace_;  // group -> CompilingScope::serial() of the trace
};

}  // namespace tessera::optim
