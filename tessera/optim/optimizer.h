#pragma once
#include "tessera/optim/detail/local_tensors.h"
#include "tessera/state/optimizer_state.h"

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

// A parameter group: parameters that share options, as in torch.optim.
template <class Options>
struct ParamGroup {
  Tensors params;        // plain or distributed
  Options options = {};  // of this group
};

// Base class of all optimizers here; OptimizerOf adds the options. It is a torch::optim::Optimizer: schedulers of
// torch::optim and functions that take a torch::optim::Optimizer& accept it. Parameters may be plain, or distributed
// over any meshes with any placements except Partial. Each rank updates its local tensors. Nothing is communicated,
// except that a gradient with other placements than its parameter (for example Partial) is redistributed first. No
// value is copied to the host: `step` is a tensor, and the learning rate may be one.
//
//   step()    check all gradients -> redistribute gradients -> create missing state -> update, list by list
//
// Parameters without gradient are skipped. State and options are saved and loaded by name with optimizer_state_dict and
// load_optimizer_state_dict (state/optimizer_state.h).
//
// Parameters and options are in param_groups(), and state in state(), as LibTorch has them. The options of a group are
// also LibTorch's options of that name (optim::AdamW: torch::optim::AdamWOptions); the next step uses what is written
// to them. The state of a parameter has another class than LibTorch's: read it with state(parameter).
class Optimizer : public torch::optim::Optimizer, public OptimizerAccess {
 public:
  // The scale of a GradScaler, and whether a gradient is inf or NaN (1.0 or 0.0): tensors of one float. Only fused
  // kernels take it: they divide gradients by `scale`, if it is defined, and skip the update if found_inf is 1.
  struct Scaling {
    at::Tensor scale, found_inf;
  };

  // Updates all parameters. If it throws UsageError or ShardingError, nothing has changed. Calls the closure first, if
  // there is one, and returns its loss.
  at::Tensor step(LossClosure closure = nullptr) override;
  // The same for gradients that are still scaled; GradScaler calls it.
  void step(const Scaling& scaling) { step_with(&scaling); }
  // Clears all gradients; set_to_none = false fills them with zeros instead.
  void zero_grad(bool set_to_none = true);

  // Number of parameter groups.
  size_t group_count() const { return param_groups_.size(); }
  // The parameters of all groups. (torch::optim::Optimizer::parameters() has those of the first group.)
  Tensors parameters() const;
  // The learning rate of a group.
  virtual double lr(size_t group) const = 0;
  // Sets the learning rate of a group. If it is a tensor, writes into the tensor.
  virtual void set_lr(size_t group, double lr) = 0;
  // Whether the group uses fused kernels.
  virtual bool is_fused(size_t group) const = 0;
  // While a step is traced, a scheduler that changes the learning rate after step() calls it: step() must not follow.
  void scheduled_in_trace();
  // Whether step(Scaling) supports the group. Only fused kernels can skip a step without the host. Groups that are not
  // fused use them too if all parameters are on the CPU and dense in memory.
  bool supports_scaling(size_t group) const;
  // The base learning rate of schedulers: the one at the time when the first scheduler was created (PyTorch:
  // "initial_lr").
  double initial_lr(size_t group);

  // The parameters by group.
  std::vector<Tensors> groups() const override;
  using torch::optim::Optimizer::state;
  // The state of a parameter; aliases. Empty before its first step.
  StateDict state(const at::Tensor& parameter) const override;
  // Replaces the state of a parameter.
  void set_state(const at::Tensor& parameter, StateDict state) override;
  // Creates the state that the first step of these parameters would create; those of other optimizers are ignored.
  // UsageError if a first step with such state would differ from one without.
  void make_state(const Tensors& parameters);
  // Changes with groups, options and state tensors; compiled steps use it as a guard.
  uint64_t generation() const override;

  // torch::save and torch::load. Throws UsageError for distributed parameters: a file of one rank would have its local
  // shards only.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  // Local tensors of one device and dtype that are updated together. state[i] has entry i of state_entries() for all
  // parameters.
  struct TensorLists {
    Tensors parameters, gradients;
    std::vector<Tensors> state;
    bool first_step = false;  // the state was created in this step
    // In a compiled step whose state was created before it was traced: is this run the first step? Null elsewhere.
    std::function<bool()> is_first_run = {};

    TensorLists only(size_t i) const;  // lists of one parameter
  };

  // An optimizer without groups. `defaults` are the options of groups that are added without options.
  explicit Optimizer(std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  // Checks `params` and adds a group.
  void add_group(const Tensors& params, std::unique_ptr<torch::optim::OptimizerOptions> options);
  // Throws UsageError if the options of a group are not of the optimizer's class. Returns the number of writes to them
  // through LibTorch's interface, without those to the learning rate.
  virtual uint64_t option_writes(size_t group) const = 0;
  // Appends the missing state tensors of a parameter to `state`.
  virtual void add_missing_state(size_t group, const at::Tensor& parameter, Tensors& state) const = 0;
  // Does a first step with the state of add_missing_state() equal one of a parameter without state, bit by bit? If not,
  // update() must handle TensorLists::is_first_run.
  virtual bool new_state_is_neutral(size_t /*group*/) const { return true; }
  // Number of state tensors per parameter.
  virtual size_t state_size(size_t group) const = 0;
  // Updates the lists.
  virtual void update(size_t group, TensorLists& lists, const Scaling* scaling) = 0;
  // Whether update() can take a Scaling.
  virtual bool has_fused_kernel() const { return true; }
  // The device of state tensors that are not like the parameter.
  virtual at::Device step_device(size_t group, const at::Tensor& parameter) const;

  // A new state tensor with the sizes and placements of the parameter.
  static at::Tensor state_like(const at::Tensor& parameter, bool zeroed);
  // Gives the optimizer a new generation().
  void changed() { generation_ = next_generation(); }

 private:
  // The state of a parameter, in state().
  struct ParamState final : torch::optim::OptimizerParamState {
    Tensors state;         // empty before the first step; undefined for entries that the options do not need
    Tensors local_state;   // local tensors of `state`, cached
    SpecRef checked_spec;  // the spec of the parameter when check_gradient last passed
    // True until the first step with state that was created before it, for a compiled step. Null: no such state.
    std::shared_ptr<bool> is_new;

    std::unique_ptr<OptimizerParamState> clone() const override { return std::make_unique<ParamState>(*this); }
  };
  // One parameter in one step. Caches what is found by following pointers: with many small parameters a step takes as
  // long as the memory it touches.
  struct ParamUpdate {
    const at::Tensor* parameter;
    ParamState* param_state;
    const at::Tensor* gradient;
    const at::Tensor* local_parameter;
    const at::Tensor* local_gradient;  // null: the gradient needs redistribution
    at::Tensor redistributed = {};     // the gradient after redistribution
    bool first_step = false;
  };
  struct ParamIndex {
    size_t group, index;
  };

  void step_with(const Scaling* scaling);
  void sync() const;
  void make_state_before_tracing();
  std::vector<std::vector<ParamUpdate>> plan_updates();
  static void redistribute_gradients(std::vector<std::vector<ParamUpdate>>& updates);
  void check_gradient(ParamIndex at, ParamState& param, const std::vector<StateEntry>& entries) const;
  static std::function<bool()> first_run_of(const std::vector<const ParamUpdate*>& updates);
  void run_updates(size_t group, const std::vector<const ParamUpdate*>& updates, const Scaling* scaling);
  void check_parameters(size_t group, const Tensors& params) const;
  std::string name_of(size_t group, size_t index, const at::Tensor& parameter) const;
  std::optional<ParamIndex> find_parameter(const at::Tensor& parameter, size_t groups) const;
  ParamIndex index_of(const at::Tensor& parameter) const;
  ParamState* find_state(const at::Tensor& parameter) const;  // nullptr if it has none
  ParamState& state_of(const at::Tensor& parameter);          // adds an empty one

  std::vector<std::optional<double>> initial_lr_;
  static uint64_t next_generation();  // a number that no optimizer has had
  mutable uint64_t generation_ = next_generation();
  mutable uint64_t seen_groups_ = 0;  // a hash of param_groups(), see sync()
  mutable size_t seen_states_ = 0;    // entries of state()
  size_t scheduled_in_trace_ = 0;     // CompilingScope::serial() of the trace in which a scheduler was stepped
};

namespace detail {
// Throws UsageError "<kind>: lr must be at least 0; found -1".
void check_at_least_zero(const char* kind, const char* name, double value);
// Throws UsageError if both are set.
void check_implementation(const char* kind, std::optional<bool> foreach, bool fused);
}  // namespace detail
}  // namespace tessera::optim
