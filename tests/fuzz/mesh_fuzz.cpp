// "dp=2,tp=4": the text of a mesh parses to the same mesh, and its number of ranks fits in 64 bits.
#include "tessera/base/error.h"
#include "tessera/mesh/device_mesh.h"

#include "fuzz_targets.h"

namespace tessera::fuzz {

void fuzz_mesh(std::string_view input) {
  MeshShape mesh;
  try {
    mesh = parse_mesh_shape(input);
  } catch (const UsageError&) {
    return;
  }
  const auto text = c10::str(mesh);
  require(parse_mesh_shape(text) == mesh, "the text is another mesh: ", text);
  int64_t ranks = 1;
  for (const int64_t size : mesh.shape)
    require(size > 0 && !__builtin_mul_overflow(ranks, size, &ranks), "the number of ranks overflows: ", text);
}

}  // namespace tessera::fuzz
