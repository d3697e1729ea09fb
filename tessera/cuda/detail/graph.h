#pragma once
#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace tessera::cuda {

// A CUDA graph: kernels that were recorded once, with their addresses and numbers, and run again with one launch.
class Graph {
 public:
  virtual ~Graph() = default;
  // Runs the recorded kernels on the current stream.
  virtual void replay() = 0;

  // Records the kernels that `work` launches on the device; they do not run. Throws if `work` does what a graph cannot
  // have, for example waits for the device. Memory that `work` allocates belongs to the graph. With `before`, a graph
  // that is always replayed earlier, both share it.
  // A build without CUDA throws UsageError.
  static std::unique_ptr<Graph> capture(c10::Device device, const std::function<void()>& work,
                                        const Graph* before = nullptr);
};

}  // namespace tessera::cuda
