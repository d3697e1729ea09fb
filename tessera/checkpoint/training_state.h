#pragma once
#include "tessera/checkpoint/save.h"
#include "tessera/state/state_dict.h"

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace torch::optim {
class LRScheduler;
class Optimizer;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace tessera {

// All that a training needs to continue, as one object: modules, optimizers, schedulers, samplers or data loaders, the
// random number generators and the progress. It can be loaded on another number of ranks and another mesh.
//
//   ts::TrainingState state{model, optimizer, scheduler, *loader};
//   state.load("out");                                    // continues from the last checkpoint, if there is one
//   for (; state.epoch < epochs; state.epoch++)
//     for (auto& batch : *loader) {                       // continues in the middle of the epoch
//       ...
//       optimizer.step();
//       scheduler.step();
//       if (++state.step % 100 == 0) state.save("out");   // out/step-100, out/step-200, ...
//     }
//
// Parts may be, in any order and number:
//   modules               plain, in DistributedDataParallel or FullyShardedDataParallel, after fully_shard, replicate
//   or
//                         parallelize_module; saved with the names that they have without wrappers
//   optimizers            of tessera::optim and torch::optim, or with an OptimizerAccess; with their learning rates
//   schedulers            of tessera::optim and torch::optim
//   samplers, loaders     with position() and set_position(int64_t)
//   torch::Generator      besides the default generators, which are always saved
//   others                with state_dict() and load_state_dict(const StateDict&): optim::GradScaler, your own
//   pointers to these     that are smart pointers
// A part is saved by its place among parts of its kind: pass them in the same order when you load.
class TrainingState {
 public:
  // Requires: all parts outlive this object.
  template <class... Parts>
  explicit TrainingState(Parts&... parts) {
    (add(parts), ...);
  }
  TrainingState(const TrainingState&) = delete;

  // Progress, counted by the caller. save() names the folder by `step`.
  int64_t step = 0, epoch = 0;
  // More numbers and texts to save, such as the best loss so far. Values of rank 0 are saved.
  dcp::Values values;

  // Saves everything as the folder `dir`/step-<step> and returns its path. All ranks must call it. See dcp::save: a
  // crash at any time leaves older checkpoints intact.
  std::string save(const std::string& dir, const dcp::SaveOptions& options = {.overwrite = true});
  // Loads `dir`, if it is a checkpoint, or the last checkpoint in it. Returns false, and changes nothing, if there is
  // none. All ranks must call it. Throws UsageError if the checkpoint has other parts.
  //
  // Generators: a rank continues with its own numbers. On more ranks than before, a new rank continues with those of
  // rank 0 if all ranks had the same, and gets its own else.
  bool load(const std::string& dir);

 private:
  template <class Part>
  void add(Part& part);
  void add_module(torch::nn::Module& module);
  void add_optimizer(torch::optim::Optimizer& optimizer);
  void add_scheduler(torch::optim::LRScheduler& scheduler);
  void add_scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler);
  void add_generator(const at::Generator& generator);

  struct Stateful {
    std::function<StateDict()> get;
    std::function<void(const StateDict&)> set;
  };
  struct Positioned {
    std::function<int64_t()> get;
    std::function<void(int64_t)> set;
  };
  std::vector<std::reference_wrapper<torch::nn::Module>> modules_;
  std::vector<std::reference_wrapper<torch::optim::Optimizer>> optimizers_;
  std::vector<Stateful> others_;
  std::vector<Positioned> positions_;
  std::vector<at::Generator> generators_;

  std::shared_ptr<torch::nn::Module> all_modules() const;
  std::vector<std::pair<std::string, at::Generator>> all_generators() const;
  void load_generators(const std::string& path, int64_t saved_ranks);
};

// torch::save for a module with distributed parameters: rank 0 writes a file that torch::load reads into the plain
// module, in a program without Tessera too. The values are gathered: rank 0 needs memory for all of them. All ranks
// must call it.
// Example:  ts::torch_save(model, "model.pt");   // torch::load(plain_model, "model.pt") reads it
void torch_save(torch::nn::Module& module, const std::string& path);
// torch::load for a module with distributed parameters: each rank reads a file of torch::save, of a plain module of
// this class, and keeps its local shards. All ranks must call it.
void torch_load(torch::nn::Module& module, const std::string& path);
// The same for holders.
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H>
void torch_save(const H& holder, const std::string& path) { torch_save(*holder.ptr(), path); }
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H>
void torch_load(H& holder, const std::string& path) { torch_load(*holder.ptr(), path); }

// Copies parameters, buffers, requires_grad and the training mode from a module to another one of the same structure.
void copy_module_state(const torch::nn::Module& from, torch::nn::Module& to);
// A copy of a module whose class is not torch::nn::Cloneable, such as a target network: `make` creates a module of the
// same structure, which gets the state of `source`. The copy of a distributed module is plain; all ranks must call it
// then.
// Example:  Net target = ts::clone(net, [] { return Net(64); });
template <class H, class Make>
requires std::is_invocable_r_v<H, Make> H clone(const H& source, Make make) {
  H copy = make();
  copy_module_state(*source, *copy);
  return copy;
}

// Finds the kind of a part; the constructor calls it.
template <class Part>
void TrainingState::add(Part& part) {
  using P = std::remove_cv_t<Part>;
  if constexpr (std::is_base_of_v<torch::detail::ModuleHolderIndicator, P>) {
    add_module(*part.ptr());
  } else if constexpr (std::is_base_of_v<torch::nn::Module, P>) {
    add_module(part);
  } else if constexpr (std::is_base_of_v<torch::optim::Optimizer, P>) {
    add_optimizer(part);
  } else if constexpr (std::is_base_of_v<torch::optim::LRScheduler, P> ||
                       std::is_base_of_v<torch::optim::ReduceLROnPlateauScheduler, P>) {
    add_scheduler(part);
  } else if constexpr (std::is_same_v<P, at::Generator>) {
    add_generator(part);
  } else if constexpr (requires(const P& saved, const StateDict& dict) {
                         { saved.state_dict() } -> std::convertible_to<StateDict>;
                         part.load_state_dict(dict);
                       }) {
    others_.push_back(
        {[&part] { return part.state_dict(); }, [&part](const StateDict& dict) { part.load_state_dict(dict); }});
  } else if constexpr (requires(const P& saved) {
                         { saved.position() } -> std::convertible_to<int64_t>;
                         part.set_position(int64_t());
                       }) {
    positions_.push_back({[&part] { return part.position(); }, [&part](int64_t at) { part.set_position(at); }});
  } else if constexpr (requires {
                         *part;
                         static_cast<bool>(part);
                       }) {
    add(*part);
  } else {
    static_assert(!sizeof(P),
                  "TrainingState takes modules, optimizers, schedulers, samplers, loaders, generators, and "
                  "classes with state_dict() and load_state_dict(), or with position() and set_position()");
  }
}

}  // namespace tessera
