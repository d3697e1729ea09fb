#include "tessera/nn/detail/forward_state.h"

#include "tessera/dtensor/detail/meta.h"
#include "tessera/dtensor/detail/rng_state.h"
#include "tessera/dtensor/random.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

namespace tessera::detail {
namespace {

at::Tensor host_state_of(at::Generator& generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

// A compiled step reads and sets the states in every run, so the trace records these as ops.
at::Tensor state_of(at::Generator& generator) { return compiling() ? rng_state(generator) : host_state_of(generator); }
void set_state_of(at::Generator& generator, const at::Tensor& state) {
  if (compiling()) return set_rng_state(state, generator);
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

bool same_world(const World& a, const World& b) { return (!a && !b) || (a && b && &a.state() == &b.state()); }

World world_now() { return World::has_current() ? World::current() : World(); }

}  // namespace

RngStates RngStates::capture(const std::vector<at::Tensor>& inputs) {
  RngStates states;
  std::vector<c10::Device> devices = {c10::Device(c10::kCPU)};
  states.world_ = world_now();
  states.world_state_ = random::state();
  for (const auto& t : inputs) {
    if (!t.defined()) continue;
    if (t.device().type() != c10::kMeta && std::find(devices.begin(), devices.end(), t.device()) == devices.end())
      devices.push_back(t.device());
    if (const auto* spec = spec_or_null(t)) {
      const auto& world = spec->mesh.state()->world;
      const bool known = same_world(world, states.world_) ||
                         std::any_of(states.others_.begin(), states.others_.end(),
                                     [&](const auto& other) { return same_world(other.first, world); });
      if (!known && world) states.others_.emplace_back(world, world.random());
    }
  }
  for (const auto& device : devices) {
    auto generator = at::globalContext().defaultGenerator(device);
    auto state = state_of(generator);
    states.generators_.emplace_back(std::move(generator), std::move(state));
  }
  return states;
}

RngStates RngStates::now() const {
  RngStates now = *this;
  for (auto& [generator, state] : now.generators_) state = state_of(generator);
  const World::Scope scope(world_);
  now.world_state_ = random::state();
  for (auto& [world, state] : now.others_) state = world.random();
  return now;
}

void RngStates::drop_unused_generators() {
  std::erase_if(generators_, [](auto& each) {
    const auto now = host_state_of(each.first);  // a CPU byte tensor, for every device
    return now.nbytes() == each.second.nbytes() &&
           std::memcmp(now.const_data_ptr(), each.second.const_data_ptr(), now.nbytes()) == 0;
  });
}

void RngStates::restore() const {
  for (auto [generator, state] : generators_) set_state_of(generator, state);
  const World::Scope scope(world_);
  random::state() = world_state_;
  for (const auto& [world, state] : others_) world.random() = state;
}

ForwardState::ForwardState(const std::vector<at::Tensor>& inputs, bool with_rng)
    : autocast_cache_(at::autocast::is_autocast_cache_enabled()),
      world_(world_now()),
      mesh_(DeviceMesh::has_current() ? DeviceMesh::current() : DeviceMesh()),
      policy_(comm_policy()),
      implicit_replication_(implicit_replication()),
      modules_(ModulePath::now()) {
  if (with_rng) rng_ = RngStates::capture(inputs);
  std::vector<Autocast> devices = {{c10::kCPU, false, c10::kFloat}, {c10::kCUDA, false, c10::kFloat}};
  for (const auto& t : inputs) {
    if (!t.defined() || !at::autocast::is_autocast_available(t.device().type())) continue;
    if (std::none_of(devices.begin(), devices.end(), [&](const auto& d) { return d.device == t.device().type(); }))
      devices.push_back({t.device().type(), false, c10::kFloat});
  }
  autocast_ = autocast_now(devices);
}

std::vector<ForwardState::Autocast> ForwardState::autocast_now(const std::vector<Autocast>& like) {
  auto now = like;
  for (auto& each : now) {
    each.enabled = at::autocast::is_autocast_enabled(each.device);
    each.dtype = at::autocast::get_autocast_dtype(each.device);
  }
  return now;
}

void ForwardState::set(const std::vector<Autocast>& autocast) {
  for (const auto& each : autocast) {
    at::autocast::set_autocast_enabled(each.device, each.enabled);
    at::autocast::set_autocast_dtype(each.device, each.dtype);
  }
}

// The destructors of the members restore the previous state in the reverse order of this list.
struct ForwardState::Scope::Guards {
  explicit Guards(const ForwardState& state)
      : world(state.world_),
        policy(state.policy_),
        modules(state.modules_),
        autocast_before(autocast_now(state.autocast_)),
        cache_before(at::autocast::is_autocast_cache_enabled()) {
    if (state.mesh_) mesh.emplace(state.mesh_);
    if (state.implicit_replication_) replication.emplace();
    if (state.rng_) {
      rng_before = state.rng_->now();
      state.rng_->restore();
    }
    ForwardState::set(state.autocast_);
    at::autocast::set_autocast_cache_enabled(state.autocast_cache_);
    at::autocast::increment_nesting();
  }
  ~Guards() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_cache_enabled(cache_before);
    ForwardState::set(autocast_before);
    if (rng_before) rng_before->restore();
  }

  World::Scope world;
  CommPolicyScope policy;
  ModulePath::Scope modules;
  std::optional<MeshScope> mesh;
  std::optional<ImplicitReplication> replication;
  std::optional<RngStates> rng_before;
  std::vector<Autocast> autocast_before;
  bool cache_before;
};

ForwardState::Scope::Scope(const ForwardState& state) : guards_(std::make_unique<Guards>(state)) {}
ForwardState::Scope::~Scope() = default;

}  // namespace tessera::detail
