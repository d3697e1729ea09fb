#include "tessera/cuda/detail/transformer_kernels.h"

#include "tessera/cuda/detail/bf16_source.h"
#include "tessera/cuda/detail/kernel.h"
#include "tessera/cuda/detail/transformer_kernels_source.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

namespace tessera::cuda {

const std::string& transformer_source() {
  static const std::string source = std::string(kBf16Source) + kTransformerSource;
  return source;
}

namespace {

constexpr int64_t kPerThread = 8, kThreads = 256;
const Kernel kRotary(transformer_source().c_str(), "rotary");
const Kernel kSwiglu(transformer_source().c_str(), "swiglu");
const Kernel kSwigluBackward(transformer_source().c_str(), "swiglu_backward");

bool is_dense_bf16(const at::Tensor& t) {
  return t.is_cuda() && t.scalar_type() == at::kBFloat16 && t.is_contiguous() && t.numel() % kPerThread == 0 &&
         t.storage_offset() % kPerThread == 0;
}

LaunchShape one_thread_per_vector(const at::Tensor& t) {
  return {.blocks = (t.numel() / kPerThread + kThreads - 1) / kThreads, .threads = kThreads};
}

at::Tensor rotary_cuda(const at::Tensor& given, const at::Tensor& table, bool inverse) {
  const auto x = given.contiguous();
  auto y = at::empty_like(x);
  kRotary.launch(x.device(), one_thread_per_vector(x), x.const_data_ptr(), table.const_data_ptr(),
                 x.numel() / kPerThread, x.size(2) * x.size(3), static_cast<int>(x.size(1)),
                 static_cast<int>(x.size(3)), inverse ? -1.0f : 1.0f, y.mutable_data_ptr());
  return y;
}

at::Tensor swiglu_cuda(const at::Tensor& gate, const at::Tensor& up) {
  auto y = at::empty_like(gate);
  kSwiglu.launch(gate.device(), one_thread_per_vector(gate), gate.const_data_ptr(), up.const_data_ptr(),
                 gate.numel() / kPerThread, y.mutable_data_ptr());
  return y;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward_cuda(const at::Tensor& given, const at::Tensor& gate,
                                                        const at::Tensor& up) {
  const auto grad = given.contiguous();
  auto dgate = at::empty_like(gate), dup = at::empty_like(up);
  kSwigluBackward.launch(gate.device(), one_thread_per_vector(gate), grad.const_data_ptr(), gate.const_data_ptr(),
                         up.const_data_ptr(), gate.numel() / kPerThread, dgate.mutable_data_ptr(),
                         dup.mutable_data_ptr());
  return {dgate, dup};
}

// The same in LibTorch's ops: the reference of the kernels.
at::Tensor rotary_reference(const at::Tensor& x, const at::Tensor& table, bool inverse) {
  const auto cos = table.select(-1, 0).unsqueeze(1), sin = table.select(-1, 1).unsqueeze(1);
  const auto pairs = x.to(at::kFloat).unflatten(-1, {-1, 2});
  const auto even = pairs.select(-1, 0), odd = pairs.select(-1, 1), signed_sin = inverse ? -sin : sin;
  return at::stack({even * cos - odd * signed_sin, even * signed_sin + odd * cos}, -1).flatten(-2).to(x.scalar_type());
}
at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; }
std::tuple<at::Tensor, at::Tensor> swiglu_backward_reference(const at::Tensor& grad, const at::Tensor& gate,
                                                             const at::Tensor& up) {
  return {at::silu_backward(grad * up, gate), grad * at::silu(gate)};
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("rotary(Tensor x, Tensor table, bool inverse) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("rotary", rotary_cuda);
  m.impl("swiglu", swiglu_cuda);
  m.impl("swiglu_backward", swiglu_backward_cuda);
}
TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("rotary", rotary_reference);
  m.impl("swiglu", swiglu_reference);
  m.impl("swiglu_backward", swiglu_backward_reference);
}

template <class Signature>
auto transformer_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor call_rotary(const at::Tensor& x, const at::Tensor& table, bool inverse) {
  static const auto op = transformer_op<at::Tensor(const at::Tensor&, const at::Tensor&, bool)>("tessera::rotary");
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(x, table, inverse);
}

struct Rotary : torch::autograd::Function<Rotary> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& table) {
    context->save_for_backward({table});
    return call_rotary(x, table, false);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    return {call_rotary(grads[0], context->get_saved_variables()[0], true), {}};
  }
};

struct Swiglu : torch::autograd::Function<Swiglu> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    static const auto op = transformer_op<at::Tensor(const at::Tensor&, const at::Tensor&)>("tessera::swiglu");
    context->save_for_backward({gate, up});
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.call(gate, up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    static const auto op =
        transformer_op<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
            "tessera::swiglu_backward");
    const auto saved = context->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [dgate, dup] = op.call(grads[0], saved[0], saved[1]);
    return {dgate, dup};
  }
};

}  // namespace

bool has_rotary(const at::Tensor& x, const at::Tensor& table) {
  return x.dim() == 4 && is_dense_bf16(x) && x.size(3) % kPerThread == 0 && table.is_cuda() &&
         table.scalar_type() == at::kFloat && table.is_contiguous() && table.dim() == 3 && table.size(0) == x.size(1) &&
         2 * table.size(1) == x.size(3) && can_launch(x.device());
}

bool has_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return is_dense_bf16(gate) && is_dense_bf16(up) && gate.sizes() == up.sizes() && can_launch(gate.device());
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& table) { return Rotary::apply(x, table); }
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return Swiglu::apply(gate, up); }

}  // namespace tessera::cuda
