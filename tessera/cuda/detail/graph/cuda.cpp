#include "tessera/cuda/detail/graph.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace tessera::cuda {
namespace {

class CapturedGraph : public Graph {
 public:
  CapturedGraph(c10::Device device, const std::function<void()>& work, const CapturedGraph* before)
      : stream_(before ? before->stream_ : c10::cuda::getStreamFromPool(false, device.index())) {
    const auto current = c10::cuda::getCurrentCUDAStream(device.index());
    wait_for(stream_, current);
    {
      const c10::cuda::CUDAStreamGuard on_side(stream_);
      graph_.capture_begin(before ? before->graph_.pool() : c10::cuda::MempoolId_t{0, 0},
                           cudaStreamCaptureModeThreadLocal);
      try {
        work();
      } catch (...) {
        end_failed_capture();
        throw;
      }
      graph_.capture_end();
    }
    wait_for(current, stream_);
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
  c10::cuda::CUDAStream stream_;  // the default stream cannot be captured; memory of a pool belongs to a stream
  mutable at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<Graph> Graph::capture(c10::Device device, const std::function<void()>& work, const Graph* before) {
  return std::make_unique<CapturedGraph>(device, work, static_cast<const CapturedGraph*>(before));
}

}  // namespace tessera::cuda
