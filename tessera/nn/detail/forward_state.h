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

// Where every stream of random numbers stands that this thread may draw from: LibTorch's generators of the CPU and of
// the devices of `inputs`, and Tessera's counters of the thread's World and of the Worlds of distributed inputs.
// LibTorch's CPU generator is one for all threads of the process: ranks that are threads draw from it in turns, so what
// they draw cannot be drawn again. Distributed tensors, and tessera::random, are free of that.
class RngStates {
 public:
  static RngStates capture(const std::vector<at::Tensor>& inputs);
  void restore() const;
  RngStates again() const;  // where the same streams stand now
  // Lets go of LibTorch's generators that still stand where they stood.
  void drop_unused_generators();

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  World world_;  // empty: the thread's own counter
  RandomState here_;
  std::vector<std::pair<World, RandomState>> others_;
};

// What a function's result depends on besides its arguments, kept in forward so that the function can be run again as
// it was run then, maybe on another thread: random streams, autocast, the World, the mesh and the policies in scope,
// the running modules.
class ForwardState {
 public:
  ForwardState(const std::vector<at::Tensor>& inputs, bool with_random);
  const std::optional<RngStates>& random() const { return random_; }
  // Called when forward has ended. A function that does not draw needs no copy of a generator (5 KB on the CPU), and
  // recomputing it must not touch one that other threads draw from.
  void drop_unused_generators() {
    if (random_) random_->drop_unused_generators();
  }

  // Puts it back while alive; what was there before comes back afterwards, random streams included.
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

  std::optional<RngStates> random_;
  std::vector<Autocast> autocast_;
  bool autocast_cache_;
  World world_;
  DeviceMesh mesh_;
  CommPolicy policy_;
  bool implicit_replication_;
  ModulePath modules_;
};

}  // namespace tessera::detail
