#pragma once
#include "tessera/state/optimizer_state.h"
#include "tessera/optim/detail/local_tensors.h"

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::optim {

template <class Options>
struct ParamGroup {
  Tensors params;
  Options options = {};
};

// What all optimizers here share; OptimizerOf adds the options. Parameters may be plain, or distributed over any meshes
// in any way; each rank updates its own pieces, and nothing is communicated, except that a gradient which does not lie
// as its parameter does (one that is still Partial) is first made to. No value is read on the host: `step` is a tensor,
// the learning rate may be one.
//
//   step()    check all gradients -> lay them out as their parameters -> make missing state -> update, list by list
//
// A parameter without gradient is left alone, and so is its state. State and options are saved and loaded by name with
// optimizer_state_dict and load_optimizer_state_dict (nn/optimizer_state.h).
class Optimizer : public OptimizerAccess {
 public:
  // What a GradScaler multiplied the loss by, and whether a gradient is not finite (1.0, else 0.0): tensors of one
  // float. Only fused implementations take it: they divide by the one, and leave all as it was if the other is 1.
  struct Scaling {
    at::Tensor scale, found_inf;
  };

  Optimizer() = default;
  Optimizer(const Optimizer&) = delete;  // two would share their state

  // Where this throws UsageError or ShardingError, nothing was changed.
  void step() { step(nullptr); }
  void step(const Scaling& scaling) { step(&scaling); }
  void zero_grad(bool set_to_none = true);

  size_t group_count() const { return groups_.size(); }
  Tensors parameters() const;  // of all groups
  virtual double lr(size_t group) const = 0;
  virtual void set_lr(size_t group, double lr) = 0;  // writes into a learning rate that is a tensor
  virtual bool is_fused(size_t group) const = 0;
  // Fused kernels alone can leave a step out without anybody knowing on the host. A group that is not fused is updated
  // by them where it could be: on the CPU, without gaps in memory.
  bool takes_scaling(size_t group) const;
  // What a scheduler starts from: the learning rate when the first one was made. As PyTorch's "initial_lr".
  double initial_lr(size_t group);

  std::vector<Tensors> groups() const override;
  StateDict state(const at::Tensor& parameter) const override;
  void set_state(const at::Tensor& parameter, StateDict rows) override;
  uint64_t generation() const override { return generation_; }

 protected:
  // Pieces of one device and dtype that are updated together. Column c of `rows` is row c of rows().
  struct Bundle {
    Tensors parameters, gradients;
    std::vector<Tensors> rows;
    bool first = false;  // the rows were made just now

    Bundle only(size_t i) const;
  };

  // Checks `params` and adds a group.
  void add_group(const Tensors& params);
  // Adds what is missing to the rows of a parameter.
  virtual void complete_rows(size_t group, const at::Tensor& parameter, Tensors& rows) const = 0;
  virtual size_t rows_used(size_t group) const = 0;
  virtual void update(size_t group, Bundle& bundle, const Scaling* scaling) = 0;
  // The device of rows that are not like the parameter.
  virtual at::Device step_device(size_t group, const at::Tensor& parameter) const;

  static at::Tensor row_like(const at::Tensor& parameter, bool zeroed);
  void changed() { generation_++; }

 private:
  struct Slot {
    at::Tensor parameter;
    Tensors rows;         // empty before the first step
    Tensors pieces = {};  // of the rows: held, so that a step does not look for them
    SpecRef fits = {};    // how the parameter lay when it and its rows were last found to go together
  };
  // One parameter in one step. What is found by following pointers is found once: with many small parameters a step
  // takes as long as the memory it touches.
  struct Job {
    Slot* slot;
    const at::Tensor* gradient;
    const at::Tensor* piece;           // of the parameter
    const at::Tensor* gradient_piece;  // null: it does not lie as the parameter does
    at::Tensor laid_out = {};          // such a gradient, once it does
    bool first = false;
  };
  struct Place {
    size_t group, index;
  };

  void step(const Scaling* scaling);
  void keep_new_rows_for_runs();
  std::vector<std::vector<Job>> plan();
  static void lay_out_gradients(std::vector<std::vector<Job>>& jobs);
  void check_gradient(size_t group, size_t index, const std::vector<Row>& described);
  void run(size_t group, const std::vector<const Job*>& jobs, const Scaling* scaling);
  std::string name_of(size_t group, size_t index, const at::Tensor& parameter) const;
  const Place& place_of(const at::Tensor& parameter) const;

  std::vector<std::vector<Slot>> groups_;
  std::unordered_map<const void*, Place> places_;  // by TensorImpl
  std::vector<std::optional<double>> initial_lr_;
  uint64_t generation_ = 0;
};

namespace detail {
// UsageError "<kind>: lr must be at least 0; found -1".
void check_at_least_zero(const char* kind, const char* name, double value);
// UsageError for both at once.
void check_implementation(const char* kind, std::optional<bool> foreach, bool fused);
}  // namespace detail
}  // namespace tessera::optim
