#include "tessera/cuda/detail/graph.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace tessera::cuda {
namespace {

class CapturedGraph : public Graph {
 public:
  CapturedGraph(c10::Device device, const std::function<void()>& work) {
    const auto current = c10::cuda::getCurrentCUDAStream(device.index());
    const auto side = c10::cuda::getStreamFromPool(false, device.index());  // the default stream cannot be captured
    wait_for(side, current);
    {
      const c10::cuda::CUDAStreamGuard on_side(side);
      graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      try {
        work();
      } catch (...) {
        end_failed_capture();
        throw;
      }
      graph_.capture_end();
    }
    wait_for(current, side);
  }
  void replay() override { graph_.replay(); }

 private:
  static void wait_for(c10::cuda::CUDAStream later, c10::cuda::CUDAStream earlier) {
    at::cuda::CUDAEvent event;
    event.record(earlier);
    event.block(later);
  }
  void end_failed_capture() {
    try {
      graph_.capture_end();
    } catch (const std::exception&) {  // the first error is the cause
    }
  }
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<Graph> Graph::capture(c10::Device device, const std::function<void()>& work) {
  return std::make_unique<CapturedGraph>(device, work);
}

}  // namespace tessera::cuda
