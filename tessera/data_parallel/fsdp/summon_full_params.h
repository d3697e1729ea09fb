#pragma once
#include <torch/nn/module.h>

#include <memory>

namespace tessera {

struct SummonOptions {
  bool recurse = true;          // also those of sharded modules inside
  bool writeback = true;        // what this rank changed of its own part stays
  bool rank0_only = false;      // the others keep their pieces; not with writeback
  bool offload_to_cpu = false;  // whole parameters are on the CPU
  bool with_grads = false;      // .grad is whole, too; only where parameters are their own (use_orig_params)
};

// While alive, the parameters of the sharded modules are whole, under their names, in the dtype they are kept in. Every
// rank opens and closes it together; not inside of forward or backward. The module may run inside, under NoGradGuard.
//
//   {
//     const SummonFullParams whole(*model);
//     torch::NoGradGuard no_grad;
//     model->embedding->weight.mul_(0.5);
//   }
//
// Each part of a parameter belongs to one rank, and what that rank makes of it stays. A rank that changes a part which
// another owns, where the owner does not change it likewise, has lost its change: this is found when it closes, and all
// ranks throw UsageError with the parameter's name (own parts are kept all the same). So do they if, with rank0_only,
// another rank writes to its pieces. With writeback = false all changes are lost, as asked.
// One inside of another is fine; for modules in both, the outer one's options count.
class SummonFullParams {
 public:
  explicit SummonFullParams(torch::nn::Module& module, SummonOptions options = {});
  ~SummonFullParams() noexcept(false);  // throws as close() does, unless an exception is under way
  SummonFullParams(const SummonFullParams&) = delete;

  void close();  // the parameters are sharded again

 private:
  struct Opened;
  std::unique_ptr<Opened> opened_;
  int exceptions_;  // under way when it was made
};

// PyTorch's name. Example:  { auto whole = summon_full_params(*model); ... }
[[nodiscard]] inline SummonFullParams summon_full_params(torch::nn::Module& module, SummonOptions options = {}) {
  return SummonFullParams(module, options);
}

}  // namespace tessera
