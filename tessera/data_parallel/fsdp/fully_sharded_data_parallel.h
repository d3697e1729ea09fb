#pragma once
#include "tessera/base/visit.h"
#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace tessera {

enum class ShardingStrategy : uint8_t {
  FullShard,         // parameters, gradients, optimizer state cut; gathered for forward, again for backward
  ShardGradOp,       // gathered once, kept until backward is through
  NoShard,           // whole everywhere: gradients are averaged
  HybridShard,       // FullShard over the mesh's last axis, copies over its first
  HybridShardZero2,  // ShardGradOp, likewise
};
std::ostream& operator<<(std::ostream& out, ShardingStrategy strategy);

struct FSDPOptions {
  DeviceMesh device_mesh = {};  // one axis; two for the hybrid strategies
  comm::Group process_group = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::FullShard;
  bool offload_params = false;  // the shard, its gradient and optimizer state live on the CPU
  bool use_orig_params = false;
  bool sync_module_states = false;  // parameters and buffers are the first rank's
};

namespace data_parallel::fsdp {
struct ShardedModule;
}

// What wrapping does, without the type of the module.
class FSDPState {
 public:
  FSDPState(torch::nn::Module& module, const FSDPOptions& options);

  // The unit's parameters as one 1-D tensor a unit, this rank's part; .grad likewise. Outer units first.
  Tensors flat_params() const;
  void set_requires_gradient_sync(bool sync);

 private:
  torch::nn::Module* module_;
  std::shared_ptr<data_parallel::fsdp::ShardedModule> own_;
};

// Cuts the parameters of a module over ranks, as one flat parameter: each rank keeps a run of it, and they are gathered
// while the module computes. Hooks are attached in place: names stay as they are, typed members stay valid.
//
//   FullyShardedDataParallel fsdp(model, {.device_mesh = mesh["dp"]});
//   optim::AdamW opt(fsdp->parameters());      // one flat parameter; use_orig_params: the originals, each a run of it
//   fsdp(x).sum().backward();
template <class H>
class FullyShardedDataParallel {
 public:
  explicit FullyShardedDataParallel(H module, const FSDPOptions& options = {})
      : module_(std::move(module)), state_(*module_, options) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    return module_(std::forward<Args>(args)...);
  }
  H& module() { return module_; }
  auto* operator->() { return module_.get(); }
  auto& operator*() { return *module_; }
  Tensors flat_params() const { return state_.flat_params(); }

  // auto guard = fsdp.no_sync();    gradients are accumulated whole, on this rank
  class NoSync {
   public:
    explicit NoSync(FSDPState& state) : state_(state) { state_.set_requires_gradient_sync(false); }
    ~NoSync() { state_.set_requires_gradient_sync(true); }
    NoSync(const NoSync&) = delete;

   private:
    FSDPState& state_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(state_); }

 private:
  H module_;
  FSDPState state_;
};

struct SummonOptions {
  bool recurse = true;
  bool writeback = true;  // what this rank changed of its own part stays; the rest is lost
};

// While alive, the parameters of the wrapped modules are whole, under their names.
class SummonFullParams {
 public:
  explicit SummonFullParams(torch::nn::Module& module, SummonOptions options = {});
  ~SummonFullParams();
  SummonFullParams(const SummonFullParams&) = delete;

 private:
  std::vector<std::shared_ptr<data_parallel::fsdp::ShardedModule>> opened_;
  SummonOptions options_;
};

}  // namespace tessera
