#include "tessera/numerics/detail/elementwise.h"

#include "tessera/base/error.h"
#include "tessera/numerics/detail/vector/vector_ops.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>

namespace tessera::numerics {
namespace {

constexpr int64_t kElements = 64;    // a multiple of every unrolled vector loop of ATen
constexpr int64_t kChunk = 1 << 14;  // up to here ATen uses one thread, also for gelu, whose limit is the lowest
constexpr uintptr_t kAlignment = 64;

// A number, or a tensor of one element that takes part in type promotion as a number. Vector code broadcasts it.
bool stays_scalar(const at::Tensor& t) { return t.dim() == 0; }

// The dims in the memory order of the first dense tensor of full size, as ATen orders the result.
std::vector<int64_t> memory_order(const std::vector<at::Tensor>& tensors, at::IntArrayRef sizes) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  for (const auto& t : tensors) {
    if (t.sizes() != sizes || !t.is_non_overlapping_and_dense()) continue;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t l, int64_t r) { return sizes[l] > 1 && sizes[r] > 1 && t.stride(l) > t.stride(r); });
    break;
  }
  return order;
}

bool is_ready(const at::Tensor& t, int64_t count) {
  return t.numel() == count && t.is_contiguous() && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment == 0;
}

struct ElementwiseCall {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  size_t first;                     // of the arguments on the stack
  std::vector<size_t> positions;    // of the tensors that are not scalars
  std::vector<at::Tensor> tensors;  // those tensors
  std::vector<int64_t> sizes, order;
  int64_t count = 1;

  ElementwiseCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op(op), stack(stack), first(stack->size() - op.schema().arguments().size()) {
    for (size_t i = first; i < stack->size(); i++) {
      const auto& v = (*stack)[i];
      if (!v.isTensor() || !v.toTensor().defined() || stays_scalar(v.toTensor())) continue;
      positions.push_back(i);
      tensors.push_back(v.toTensor());
      sizes = sizes.empty() ? v.toTensor().sizes().vec() : at::infer_size(sizes, v.toTensor().sizes());
    }
    order = memory_order(tensors, sizes);
    for (const auto size : sizes) count *= size;
  }
  bool writes_self() const {
    const auto* alias = op.schema().arguments()[0].alias_info();
    return alias && alias->isWrite();
  }
  // True if vector code computes every element of the call as it is.
  bool runs_as_it_is() const {
    if (count % kElements != 0 || (count > kChunk && at::get_num_threads() > 1)) return false;
    return std::all_of(tensors.begin(), tensors.end(),
                       [&](const at::Tensor& t) { return is_ready(t.sizes() == sizes ? t.permute(order) : t, count); });
  }
  // The tensor as a buffer of `padded` elements in memory order, 1 behind the last.
  at::Tensor padded_buffer(const at::Tensor& t, int64_t padded) const {
    auto buffer = at::empty({padded}, t.options());
    std::vector<int64_t> permuted_sizes;
    for (const auto d : order) permuted_sizes.push_back(sizes[static_cast<size_t>(d)]);
    buffer.narrow(0, 0, count).view(permuted_sizes).copy_(t.expand(sizes).permute(order));
    buffer.narrow(0, count, padded - count).fill_(1);
    return buffer;
  }
  at::Tensor from_buffer(const at::Tensor& buffer) const {
    std::vector<int64_t> permuted_sizes, back(order.size());
    for (size_t i = 0; i < order.size(); i++) {
      permuted_sizes.push_back(sizes[static_cast<size_t>(order[i])]);
      back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
    }
    return buffer.narrow(0, 0, count).view(permuted_sizes).permute(back);
  }
};

// ---- gelu: a kernel that products have as an epilogue, too

// The memory of a dense tensor as a vector.
at::Tensor as_vector(const at::Tensor& t) { return t.as_strided({t.numel()}, {1}); }
at::Tensor with_layout_of(const at::Tensor& like, const at::Tensor& t) {
  if (t.strides() == like.strides()) return t;
  return at::empty_like(like).copy_(t);
}

// gelu(x, approximate) and gelu_backward(gradient, x, approximate) in float32 on the CPU. False: another op.
bool run_gelu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name();
  const bool backward = name.name == "aten::gelu_backward";
  if ((!backward && name.name != "aten::gelu") || !name.overload_name.empty()) return false;
  const auto arguments = torch::jit::last(*stack, backward ? 3 : 2);
  const auto x = arguments[backward].toTensor();
  const bool tanh = arguments.back().toStringRef() == "tanh";
  const auto covers = [](const at::Tensor& t) { return t.is_cpu() && t.scalar_type() == at::kFloat && !t.is_neg(); };
  if (!covers(x) || (backward && (!covers(arguments[0].toTensor()) || arguments[0].toTensor().sizes() != x.sizes())))
    return false;
  const auto out = at::empty_like(x), dense = with_layout_of(out, x);
  if (backward)
    vector_gelu_backward(as_vector(out), as_vector(with_layout_of(out, arguments[0].toTensor())), as_vector(dense),
                         tanh);
  else
    vector_gelu(as_vector(out), as_vector(dense), tanh);
  torch::jit::drop(*stack, backward ? 3 : 2);
  stack->emplace_back(out);
  return true;
}

// The kernel of tessera::elementwise_<name of op>.
class ElementwiseKernel final : public c10::OperatorKernel {
 public:
  explicit ElementwiseKernel(const c10::OperatorHandle& op) : op_(op) {}
  void operator()(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
    run_elementwise(op_, stack);
  }

 private:
  c10::OperatorHandle op_;
};

}  // namespace

c10::OperatorHandle registered_elementwise(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto name = op.operator_name();
  name.name = "tessera::elementwise_" + name.name.substr(name.name.find("::") + 2);
  if (const auto known = c10::Dispatcher::singleton().findSchema(name)) return *known;
  // Never destroyed, because programs call the op until the process ends.
  static auto* library = new torch::Library(torch::Library::FRAGMENT, "tessera", std::nullopt, __FILE__, __LINE__);
  library->def(op.schema().cloneWithName(name.name, name.overload_name));
  library->impl(name.overload_name.empty() ? name.name.c_str() : (name.name + "." + name.overload_name).c_str(),
                torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                torch::CppFunction::makeFromBoxedFunctor(std::make_unique<ElementwiseKernel>(op))));
  return *c10::Dispatcher::singleton().findSchema(name);
}

void run_elementwise(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const OpModesOff no_modes;
  const at::AutoDispatchBelowADInplaceOrView below;
  if (run_gelu(op, stack)) return;
  const ElementwiseCall call(op, stack);
  // A call of scalars alone has one element: scalar code on every mesh.
  if (call.tensors.empty() || call.count == 0 || call.runs_as_it_is()) return op.callBoxed(stack);

  const int64_t padded = (call.count + kElements - 1) / kElements * kElements;
  std::vector<at::Tensor> buffers;
  for (const auto& t : call.tensors) buffers.push_back(call.padded_buffer(t, padded));
  at::Tensor result;
  for (int64_t begin = 0; begin < padded; begin += kChunk) {
    const int64_t length = std::min(kChunk, padded - begin);
    torch::jit::Stack part(stack->begin() + static_cast<int64_t>(call.first), stack->end());
    for (size_t i = 0; i < buffers.size(); i++)
      part[call.positions[i] - call.first] = buffers[i].narrow(0, begin, length);
    op.callBoxed(part);
    if (call.writes_self()) continue;
    TESSERA_CHECK(part.size() == 1 && part[0].isTensor(), InternalError, op.schema().operator_name(),
                  " has more than one result");
    if (!result.defined()) result = at::empty({padded}, part[0].toTensor().options());
    result.narrow(0, begin, length).copy_(part[0].toTensor());
  }
  at::Tensor out;
  if (call.writes_self()) {
    out = (*stack)[call.first].toTensor();
    TESSERA_CHECK(!stays_scalar(out), InternalError, op.schema().operator_name(), " writes to a scalar");
    out.copy_(call.from_buffer(buffers[0]));
  } else {
    out = call.from_buffer(result);
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(std::move(out));
}

}  // namespace tessera::numerics
