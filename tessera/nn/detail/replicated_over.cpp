#include "tessera/nn/detail/replicated_over.h"

#include "tessera/nn/module_tree.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

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

namespace {

const Module* module_of(const ModuleFrame& frame) {
  return frame.name == &detail::path_of ? static_cast<const Module*>(frame.module) : nullptr;
}

DeviceMesh mesh_of_running_module() {
  for (const auto* frame = innermost_module(); frame; frame = frame->outer)
    if (const auto* module = module_of(*frame))
      if (auto mesh = replicated_over(*module)) return mesh;
  return {};
}

// The modules of this rank for which it was set. Ranks can be threads.
std::vector<std::pair<std::shared_ptr<const Module>, DeviceMesh>> parallelized_modules_of_this_rank() {
  std::vector<std::pair<std::shared_ptr<const Module>, DeviceMesh>> found;
  if (!World::has_current()) return found;
  const World here = World::current();
  auto& all = parallelized_modules();
  const std::lock_guard lock(all.mutex);
  for (const auto& [address, entry] : all.by_address) {
    auto mesh = entry.mesh.lock();
    auto module = entry.module.lock();
    if (!mesh || !module || mesh->world.rank() != here.rank() || mesh->world.store() != here.store()) continue;
    found.emplace_back(std::move(module), DeviceMesh(mesh));
  }
  return found;
}

bool contains(const Module& outer, const Module& inner) {
  if (&outer == &inner) return true;
  const auto children = outer.children();
  return std::any_of(children.begin(), children.end(), [&](const auto& child) { return contains(*child, inner); });
}

}  // namespace

bool is_parallelized_module_running() { return static_cast<bool>(mesh_of_running_module()); }

DeviceMesh running_module_is_replicated_over() {
  if (auto mesh = mesh_of_running_module()) return mesh;
  const Module* outermost = nullptr;
  for (const auto* frame = innermost_module(); frame; frame = frame->outer)
    if (const auto* module = module_of(*frame)) outermost = module;
  if (!outermost) return {};
  for (const auto& [module, mesh] : parallelized_modules_of_this_rank())
    if (contains(*module, *outermost) || contains(*outermost, *module)) return mesh;
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
