#pragma once
#include "tessera/mesh/device_mesh.h"

// Equal meshes of one rank share one MeshState. The world keeps it until it is destroyed.
namespace tessera::detail {

bool same_mesh(const MeshState& a, const MeshState& b);              // ranks, shape, device type, names
c10::intrusive_ptr<MeshState> find_interned(const MeshState& like);  // null if like.world has no equal mesh
void intern(const c10::intrusive_ptr<MeshState>& mesh);

}  // namespace tessera::detail
