#pragma once
#include <cstdint>

// Loops on LibTorch's threads. at::parallel_for is a template that needs OpenMP in the code that calls it; without, it
// runs on one thread. This one calls a function that LibTorch exports, so there is one pool and one OpenMP runtime.
namespace tessera {

using LoopPart = void (*)(int64_t begin, int64_t end, void* body);
void parallel_for(int64_t begin, int64_t end, int64_t grain, LoopPart part, void* body);

// How many parts of such loops have run on another thread than the caller's, in this process. For tests.
int64_t parts_run_by_other_threads();

// Calls body(i, j) for parts [i, j) of [begin, end), which have at least `grain` elements but the last one, on up to
// at::get_num_threads() threads. Inside of another such loop: one call. The body must not use tensors, because threads
// of the pool have no thread-local state of the caller. The first exception of a part is thrown here.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, F&& body) {
  const auto call = [](int64_t i, int64_t j, void* f) { (*static_cast<F*>(f))(i, j); };
  parallel_for(begin, end, grain, call, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace tessera
