#pragma once
#include "tessera/comm/world.h"
#include "tessera/dtensor/policy.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/detail/module_path.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace tessera::detail {

// The states of all random number generators that this thread may use: LibTorch's generators of the CPU and of the
// devices of `inputs`, and Tessera's counters of the thread's World and of the Worlds of distributed inputs. All
// threads of a process share LibTorch's CPU generator. If ranks are threads they use it concurrently, so its numbers
// cannot be reproduced. Distributed tensors and tessera::random do not have this problem.
class RngStates {
 public:
  static RngStates capture(const std::vector<at::Tensor>& inputs);
  void restore() const;
  RngStates now() const;  // the current states of the same generators
  // Drops the LibTorch generators whose state did not change since capture().
  void drop_unused_generators();

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  World world_;  // empty: the counter of the thread
  RandomState world_state_;
  std::vector<std::pair<World, RandomState>> others_;
};

// The state besides its arguments that the result of a function depends on. Forward captures it, so that recomputation,
// possibly on another thread, runs under the same conditions: random states, autocast, the World, the mesh and policies
// in scope, the running modules.
class ForwardState {
 public:
  ForwardState(const std::vector<at::Tensor>& inputs, bool with_rng);
  const std::optional<RngStates>& rng() const { return rng_; }
  // Called after forward. A function without random numbers needs no copy of a generator state (5 KB on the CPU), and
  // its recomputation must not change a generator that other threads use.
  void drop_unused_generators() {
    if (rng_) rng_->drop_unused_generators();
  }

  // Restores the captured state in this scope. The destructor restores the previous state, random states included.
  class Scope {
   public:
    explicit Scope(const ForwardState& state);
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    struct Guards;
    std::unique_ptr<Guards> guards_;
  };

 private:
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    c10::ScalarType dtype;
  };
  static std::vector<Autocast> autocast_now(const std::vector<Autocast>& like);
  static void set(const std::vector<Autocast>& autocast);

  std::optional<RngStates> rng_;
  std::vector<Autocast> autocast_;
  bool autocast_cache_;
  World world_;
  DeviceMesh mesh_;
  CommPolicy policy_;
  bool implicit_replication_;
  ModulePath modules_;
};

}  // namespace tessera::detail
