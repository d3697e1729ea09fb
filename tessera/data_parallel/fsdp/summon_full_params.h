#pragma once
#include <torch/nn/module.h>

#include <memory>

namespace tessera {

// Options of summon_full_params, with PyTorch's names.
struct SummonOptions {
  bool recurse = true;          // also for sharded modules below
  bool writeback = true;        // changes that this rank makes to its own shard stay
  bool rank0_only = false;      // other ranks keep their shards; not with writeback
  bool offload_to_cpu = false;  // the full parameters are on the CPU
  bool with_grads = false;      // .grad is unsharded too; needs use_orig_params
};

// While alive, the parameters of sharded modules are unsharded, under their original names and in the dtype of the
// shards. All ranks create and close it together, outside forward and backward. The module may run inside it under
// NoGradGuard.
//
//   {
//     const SummonFullParams full(*model);
//     torch::NoGradGuard no_grad;
//     model->embedding->weight.mul_(0.5);
//   }
//
// Each element of a parameter belongs to the shard of one rank, and only that rank's change stays. If a rank changes
// elements that another rank owns, and the owner does not make the same change, all ranks throw UsageError with the
// parameter's name on close; each rank's changes to its own shard stay. All ranks also throw if, with rank0_only, a
// rank other than 0 writes to its shard. With writeback = false all changes are discarded.
// Objects may be nested. For modules in both, the options of the outer one apply.
class SummonFullParams {
 public:
  // Unshards the parameters of `module`.
  explicit SummonFullParams(torch::nn::Module& module, SummonOptions options = {});
  // Calls close(). Throws what close() throws, except during stack unwinding.
  ~SummonFullParams() noexcept(false);
  SummonFullParams(const SummonFullParams&) = delete;

  // Reshards the parameters. The destructor then does nothing.
  void close();

 private:
  struct Groups;
  std::unique_ptr<Groups> groups_;
  int exceptions_;  // uncaught exceptions at construction
};

// PyTorch's name for it.
// Example:  { auto full = summon_full_params(*model); ... }
[[nodiscard]] inline SummonFullParams summon_full_params(torch::nn::Module& module, SummonOptions options = {}) {
  return SummonFullParams(module, options);
}

}  // namespace tessera
