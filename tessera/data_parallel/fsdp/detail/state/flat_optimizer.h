#pragma once
#include "tessera/data_parallel/fsdp/detail/state/unflattened_parameters.h"
#include "tessera/state/optimizer_state.h"

#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::data_parallel::fsdp {

// An optimizer of flat parameters, seen as one of the parameters they were made of: those that Originals stands in for.
// One of pieces (use_orig_params) likewise. Others are passed through.
class FlatOptimizer final : public OptimizerAccess {
 public:
  // Requires: both outlive it.
  FlatOptimizer(OptimizerAccess& optimizer, const Originals& originals, Form form);

  void gather();                            // before state(): every row whole, by name, in its form. All ranks call it
  void check(const StateDict& dict) const;  // before loading: UsageError for what one flat parameter cannot have
  void finish();                            // after loading: flat parameters get what set_state() brought

  std::string kind() const override { return optimizer_.kind(); }
  std::vector<std::vector<at::Tensor>> groups() const override;
  StateDict options(size_t group) const override;
  void set_options(size_t group, const StateDict& options) override { optimizer_.set_options(group, options); }
  void check_options(size_t group, const StateDict& options) const override {
    optimizer_.check_options(group, options);
  }
  std::vector<Row> rows() const override { return optimizer_.rows(); }
  bool has_rows_from_the_start() const override { return optimizer_.has_rows_from_the_start(); }
  StateDict state(const at::Tensor& parameter) const override;
  void set_state(const at::Tensor& parameter, StateDict rows) override;

 private:
  // A flat unit that the optimizer has, as one parameter or as its members.
  struct Part {
    std::shared_ptr<ShardedModule> sharded;
    const Tensors* stand_ins;
    std::vector<StateDict> gathered;  // by member
    StateDict loaded;                 // rows like the shard
    bool touched = false;

    const Unit& unit() const { return *sharded->turn->unit; }
    bool is_one() const { return unit().options().flat_parameter; }
  };
  struct Place {
    size_t part, member;
  };

  void gather_flat(Part& part) const;
  void gather_pieces(Part& part) const;
  void set_pieces(const Part& part, size_t member, const StateDict& rows);
  void set_flat(Part& part, size_t member, const StateDict& rows);

  OptimizerAccess& optimizer_;
  Form form_;
  const Originals& originals_;
  std::vector<Part> parts_;
  std::unordered_map<const void*, Place> places_;               // by stand-in
  std::unordered_map<const void*, std::vector<Place>> inside_;  // by the optimizer's own parameter
};

}  // namespace tessera::data_parallel::fsdp
