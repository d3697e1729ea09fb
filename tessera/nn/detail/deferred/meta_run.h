#pragma once
#include "tessera/nn/detail/deferred/call.h"

#include <optional>
#include <vector>

// What an op gives on tensors without memory: the same shapes, the same sharing, the same complaints.
namespace tessera::detail::deferred {

// Where the results would be. device(meta) is what the options of a deferred tensor say, and stands for where it is.
c10::Device real_device(const DeferredCall& call, const Tape& tape);

// The argument `copy` of a to() that goes to another device: there it copies, on meta it would return its argument.
std::optional<size_t> copy_to_set(const DeferredCall& call, c10::Device device);

// The results, on the meta device; in-place ops give their arguments. None: the op has no kernel for meta and was taken
// apart instead, into ops that came through the dispatcher; its results are on the stack in place of its arguments.
std::optional<std::vector<c10::IValue>> run_on_meta(const DeferredCall& call, c10::Device device,
                                                  torch::jit::Stack* stack);

// A deferred tensor refers to two storages without memory. One complains when its memory is asked for, as users may do
// by mistake; LibTorch's kernels for meta ask, too, when they look for overlaps, so they are shown the other.
void hide_memory(const at::Tensor& t, c10::Storage complaining);
c10::Storage error_storage(const c10::Storage& quiet);

}  // namespace tessera::detail::deferred
