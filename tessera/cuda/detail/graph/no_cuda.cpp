#include "tessera/base/error.h"
#include "tessera/cuda/detail/graph.h"

namespace tessera::cuda {

std::unique_ptr<Graph> Graph::capture(c10::Device device, const std::function<void()>&, const Graph*) {
  TESSERA_CHECK(false, UsageError, "this build of Tessera has no CUDA and cannot capture a graph on ", device,
                "; configure with -DTESSERA_CUDA=ON");
}

}  // namespace tessera::cuda
