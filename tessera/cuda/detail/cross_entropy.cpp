#include "tessera/cuda/detail/cross_entropy.h"

#include "tessera/base/error.h"
#include "tessera/cuda/detail/cross_entropy_source.h"
#include "tessera/cuda/detail/kernel.h"

#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <tuple>

namespace tessera::cuda {
namespace {

constexpr int64_t kVectorBytes = 16;
const Kernel kForward16(kCrossEntropySource, "cross_entropy_forward_bf16");
const Kernel kForward32(kCrossEntropySource, "cross_entropy_forward_f32");
const Kernel kBackward16(kCrossEntropySource, "cross_entropy_backward_bf16");
const Kernel kBackward32(kCrossEntropySource, "cross_entropy_backward_f32");

void check_arguments(const at::Tensor& logits, const at::Tensor& targets) {
  TESSERA_CHECK(logits.dim() == 2 && targets.dim() == 1 && targets.size(0) == logits.size(0), UsageError,
                "cross_entropy_rows takes logits (N, classes) and targets (N); found sizes ", logits.sizes(), " and ",
                targets.sizes());
  TESSERA_CHECK(targets.scalar_type() == at::kLong, UsageError, "cross_entropy_rows takes int64 targets; found ",
                targets.scalar_type());
}

LaunchShape one_block_per_row(const at::Tensor& logits) { return {.blocks = logits.size(0), .threads = 512}; }

std::tuple<at::Tensor, at::Tensor> forward_cuda(const at::Tensor& logits, const at::Tensor& targets, int64_t ignored) {
  check_arguments(logits, targets);
  const auto x = logits.contiguous(), t = targets.contiguous();
  const auto rows = x.options().dtype(at::kFloat);
  auto loss = at::empty({x.size(0)}, rows), log_sum = at::empty({x.size(0)}, rows);
  const auto& kernel = x.scalar_type() == at::kFloat ? kForward32 : kForward16;
  kernel.launch(x.device(), one_block_per_row(x), x.const_data_ptr(), t.const_data_ptr(), x.size(1), ignored,
                loss.mutable_data_ptr(), log_sum.mutable_data_ptr());
  return {loss, log_sum};
}

// A thread reads 16 bytes of the logits before it writes them, so `out` may be the logits.
void backward_cuda_into(const at::Tensor& out, const at::Tensor& grad, const at::Tensor& x, const at::Tensor& targets,
                        const at::Tensor& log_sum, int64_t ignored) {
  const auto t = targets.contiguous();
  const auto& kernel = x.scalar_type() == at::kFloat ? kBackward32 : kBackward16;
  kernel.launch(x.device(), one_block_per_row(x), grad.const_data_ptr(), grad.stride(0), x.const_data_ptr(),
                t.const_data_ptr(), log_sum.const_data_ptr(), x.size(1), ignored, out.mutable_data_ptr());
}

at::Tensor backward_cuda(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& targets,
                         const at::Tensor& log_sum, int64_t ignored) {
  const auto x = logits.contiguous();
  auto out = at::empty_like(x);
  backward_cuda_into(out, grad, x, targets, log_sum, ignored);
  return out;
}

at::Tensor& backward_cuda_in_place(at::Tensor& logits, const at::Tensor& grad, const at::Tensor& targets,
                                   const at::Tensor& log_sum, int64_t ignored) {
  if (logits.is_contiguous())
    backward_cuda_into(logits, grad, logits, targets, log_sum, ignored);
  else
    logits.copy_(backward_cuda(grad, logits, targets, log_sum, ignored));
  return logits;
}

// The same in LibTorch's ops: the reference of the kernels.
std::tuple<at::Tensor, at::Tensor> forward_reference(const at::Tensor& logits, const at::Tensor& targets,
                                                     int64_t ignored) {
  check_arguments(logits, targets);
  const auto x = logits.to(at::kFloat);
  const auto counted = targets.ne(ignored);
  const auto index = at::where(counted, targets, 0).unsqueeze(1);
  const auto log_sum = at::logsumexp(x, {1});
  return {at::where(counted, log_sum - x.gather(1, index).squeeze(1), 0), log_sum};
}

at::Tensor backward_reference(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& targets,
                              const at::Tensor& log_sum, int64_t ignored) {
  const auto counted = targets.ne(ignored);
  const auto index = at::where(counted, targets, 0).unsqueeze(1);
  auto out = (logits.to(at::kFloat) - log_sum.unsqueeze(1)).exp_();
  out.scatter_add_(1, index, at::empty_like(index, out.options()).fill_(-1));
  return out.mul_(at::where(counted, grad, 0).unsqueeze(1)).to(logits.scalar_type());
}

at::Tensor& backward_reference_in_place(at::Tensor& logits, const at::Tensor& grad, const at::Tensor& targets,
                                        const at::Tensor& log_sum, int64_t ignored) {
  return logits.copy_(backward_reference(grad, logits, targets, log_sum, ignored));
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("cross_entropy_rows(Tensor logits, Tensor targets, int ignore_index) -> (Tensor loss, Tensor log_sum)");
  m.def(
      "cross_entropy_rows_backward(Tensor grad, Tensor logits, Tensor targets, Tensor log_sum, int ignore_index) -> "
      "Tensor");
  m.def(
      "cross_entropy_rows_backward_(Tensor(a!) logits, Tensor grad, Tensor targets, Tensor log_sum, int ignore_index) "
      "-> Tensor(a!)");
}
TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("cross_entropy_rows", forward_cuda);
  m.impl("cross_entropy_rows_backward", backward_cuda);
  m.impl("cross_entropy_rows_backward_", backward_cuda_in_place);
}
TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("cross_entropy_rows", forward_reference);
  m.impl("cross_entropy_rows_backward", backward_reference);
  m.impl("cross_entropy_rows_backward_", backward_reference_in_place);
}

template <class Signature>
auto& op_named(const char* name) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  return op;
}

struct CrossEntropyRows : torch::autograd::Function<CrossEntropyRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, int64_t ignored, bool reuse_logits) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [loss, log_sum] =
        op_named<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, int64_t)>(
            "tessera::cross_entropy_rows")
            .call(logits, targets, ignored);
    context->save_for_backward({logits, targets, log_sum});
    context->saved_data["ignored"] = ignored;
    context->saved_data["reuse_logits"] = reuse_logits;
    return loss;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto saved = context->get_saved_variables();
    const bool in_place =
        context->saved_data["reuse_logits"].toBool() && !torch::autograd::get_current_graph_task_keep_graph();
    if (in_place) {
      const at::AutoDispatchBelowADInplaceOrView below;
      auto logits = saved[0].detach();
      op_named<at::Tensor&(at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t)>(
          "tessera::cross_entropy_rows_backward_")
          .call(logits, grads[0], saved[1], saved[2], context->saved_data["ignored"].toInt());
      return {logits, {}, {}, {}};
    }
    return {op_named<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t)>(
                "tessera::cross_entropy_rows_backward")
                .call(grads[0], saved[0], saved[1], saved[2], context->saved_data["ignored"].toInt()),
            {},
            {},
            {}};
  }
};

}  // namespace

bool has_cross_entropy(const at::Tensor& logits) {
  const auto dtype = logits.scalar_type();
  const auto aligned = logits.size(-1) * static_cast<int64_t>(logits.element_size()) % kVectorBytes == 0;
  return logits.is_cuda() && (dtype == at::kBFloat16 || dtype == at::kFloat) && aligned && can_launch(logits.device());
}

at::Tensor cross_entropy_rows(const at::Tensor& logits, const at::Tensor& targets, int64_t ignore_index,
                              bool reuse_logits) {
  return CrossEntropyRows::apply(logits, targets, ignore_index, reuse_logits);
}

}  // namespace tessera::cuda
