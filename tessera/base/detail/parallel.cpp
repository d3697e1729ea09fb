#include "tessera/base/detail/parallel.h"

#include "tessera/base/error.h"

#include <ATen/Parallel.h>
#include <torch/csrc/stable/c/shim.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

namespace tessera {
namespace {

std::atomic<int64_t> parts_elsewhere = 0;

struct Loop {
  LoopPart part;
  void* body;
  std::thread::id caller = std::this_thread::get_id();
  std::mutex mutex;
  std::exception_ptr error;

  static void run(int64_t begin, int64_t end, void* self) {
    auto& loop = *static_cast<Loop*>(self);
    if (std::this_thread::get_id() != loop.caller) parts_elsewhere++;
    try {
      loop.part(begin, end, loop.body);
    } catch (...) {  // it must not cross LibTorch's C interface
      const std::lock_guard lock(loop.mutex);
      if (!loop.error) loop.error = std::current_exception();
    }
  }
};

}  // namespace

int64_t parts_run_by_other_threads() { return parts_elsewhere; }

void parallel_for(int64_t begin, int64_t end, int64_t grain, LoopPart part, void* body) {
  if (begin >= end) return;
  if (end - begin <= grain || end - begin == 1 || at::get_num_threads() == 1) return part(begin, end, body);
  Loop loop{.part = part, .body = body, .mutex = {}, .error = {}};
  const auto code = torch_parallel_for(begin, end, grain, Loop::run, &loop);
  if (loop.error) std::rethrow_exception(loop.error);
  TESSERA_CHECK(code == AOTI_TORCH_SUCCESS, InternalError, "LibTorch's torch_parallel_for failed with code ", code);
}

}  // namespace tessera
