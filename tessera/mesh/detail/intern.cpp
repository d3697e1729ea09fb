#include "tessera/mesh/detail/intern.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/world_state.h"

namespace tessera::detail {
namespace {

struct MeshTable final : WorldAttachment {
  std::vector<c10::intrusive_ptr<MeshState>> meshes;

  void clear() override {
    for (auto& mesh : meshes)
      for (auto& attachment : mesh->attachments)
        if (attachment) attachment->clear();
    meshes.clear();
  }
};

}  // namespace

bool same_mesh(const MeshState& a, const MeshState& b) {
  return a.ranks == b.ranks && a.shape == b.shape && a.device_type == b.device_type && a.names == b.names;
}

c10::intrusive_ptr<MeshState> find_interned(const MeshState& like) {
  auto* table = static_cast<MeshTable*>(like.world.state().meshes.get());
  if (!table) return {};
  for (const auto& mesh : table->meshes)
    if (same_mesh(*mesh, like)) return mesh;
  return {};
}

void intern(const c10::intrusive_ptr<MeshState>& mesh) {
  World::State& world = mesh->world.state();
  TESSERA_CHECK(!world.destroyed, UsageError, "the world is destroyed; call init() again before you make a mesh");
  if (!world.meshes) world.meshes = std::make_unique<MeshTable>();
  static_cast<MeshTable*>(world.meshes.get())->meshes.push_back(mesh);
}

}  // namespace tessera::detail
