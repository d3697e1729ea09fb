#pragma once
#include <ATen/core/stack.h>

#include <atomic>

namespace tessera::detail {

// Context parallelism takes scaled_dot_product_attention on DTensors over in its scope: the function replaces the
// arguments on the stack by the result and returns true, or returns false outside of a scope. Null until a first scope
// is made.
inline std::atomic<bool (*)(torch::jit::Stack&)> attention_of_scope{nullptr};

}  // namespace tessera::detail
