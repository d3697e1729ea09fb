#include "tessera/nn/detail/replicated_over.h"

#include "tessera/nn/module_tree.h"

#include <mutex>
#include <unordered_map>

namespace tessera {
namespace {

// Owns neither the modules nor the meshes. The world of a mesh keeps its state alive.
struct ParallelizedModule {
  std::weak_ptr<const Module> module;
  c10::weak_intrusive_ptr<detail::MeshState> mesh;
};

struct ParallelizedModules {
  std::mutex mutex;
  std::unordered_map<const Module*, ParallelizedModule> by_address;
};

ParallelizedModules& parallelized_modules() {
  static auto* modules = new ParallelizedModules;
  return *modules;
}

}  // namespace

void set_replicated_over(Module& module, const DeviceMesh& mesh) {
  auto& all = parallelized_modules();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.by_address, [](const auto& item) { return item.second.module.expired(); });
  all.by_address.erase(&module);
  if (!mesh) return;
  all.by_address.emplace(&module,
                         ParallelizedModule{module.weak_from_this(), c10::weak_intrusive_ptr(mesh.state_ptr())});
}

DeviceMesh replicated_over(const Module& module) {
  auto& all = parallelized_modules();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_address.find(&module);
  if (found == all.by_address.end() || found->second.module.expired()) return {};
  return DeviceMesh(found->second.mesh.lock());
}

DeviceMesh running_module_is_replicated_over() {
  for (const auto* frame = innermost_module(); frame; frame = frame->outer) {
    if (frame->name != &detail::path_of) continue;
    if (auto mesh = replicated_over(*static_cast<const Module*>(frame->module))) return mesh;
  }
  return {};
}

bool is_tensor_parallel_mesh(const DeviceMesh& mesh) {
  auto& all = parallelized_modules();
  const std::lock_guard lock(all.mutex);
  for (const auto& [module, entry] : all.by_address)
    if (entry.mesh.lock() == mesh.state_ptr()) return true;
  return false;
}

}  // namespace tessera
