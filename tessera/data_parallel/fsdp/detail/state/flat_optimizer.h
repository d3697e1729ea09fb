#pragma once
#include "tessera/data_parallel/fsdp/detail/state/unflattened_parameters.h"
#include "tessera/state/optimizer_state.h"

#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::data_parallel::fsdp {

// Shows the state of an optimizer of flat parameters per unflattened parameter: UnflattenedParameters has the meta
// tensors that identify them. With use_orig_params it shows the state of local shards as state of entire parameters.
// Other parameters are passed through.
class FlatOptimizer final : public OptimizerAccess {
 public:
  // Requires: `optimizer` and `unflattened` outlive it.
  FlatOptimizer(OptimizerAccess& optimizer, const UnflattenedParameters& unflattened, StateDictForm form);

  // Before state(): gathers the optimizer state and converts it. All ranks call it.
  void gather();
  // Before loading: throws UsageError if parameters of one flat parameter have different scalars (step).
  void check(const StateDict& dict) const;
  // After loading: gives each flat parameter the state that set_state() collected.
  void finish();

  std::string kind() const override { return optimizer_.kind(); }
  std::vector<std::vector<at::Tensor>> groups() const override;
  StateDict options(size_t group) const override;
  void set_options(size_t group, const StateDict& options) override { optimizer_.set_options(group, options); }
  void check_options(size_t group, const StateDict& options) const override {
    optimizer_.check_options(group, options);
  }
  std::vector<OptimizerAccess::StateEntry> state_entries() const override { return optimizer_.state_entries(); }
  bool has_state_before_first_step() const override { return optimizer_.has_state_before_first_step(); }
  StateDict state(const at::Tensor& parameter) const override;
  void set_state(const at::Tensor& parameter, StateDict state) override;

 private:
  // A group with a flat layout whose flat parameter, or whose parameters, the optimizer has.
  struct FlatGroup {
    std::shared_ptr<ShardedModule> sharded;
    const Tensors* meta_params;
    std::vector<StateDict> gathered;  // per parameter
    StateDict loaded;                 // state of the flat parameter
    bool has_loaded = false;

    const ParamGroup& group() const { return sharded->group(); }
    bool has_flat_parameter() const { return group().options().flat_parameter; }  // false: use_orig_params
  };
  struct ParamIndex {
    size_t flat_group, param;
  };

  void gather_flat(FlatGroup& flat_group) const;
  void gather_local_shards(FlatGroup& flat_group) const;
  void set_local_shards(const FlatGroup& flat_group, size_t param, const StateDict& state);
  void set_flat(FlatGroup& flat_group, size_t param, const StateDict& state);

  OptimizerAccess& optimizer_;
  StateDictForm form_;
  const UnflattenedParameters& unflattened_;
  std::vector<FlatGroup> flat_groups_;
  std::unordered_map<const void*, ParamIndex> by_meta_param_;
  std::unordered_map<const void*, std::vector<ParamIndex>> by_optimizer_param_;
};

}  // namespace tessera::data_parallel::fsdp
