#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

// Replacements for aten ops that throw, stop the process, or give wrong sizes for a local tensor without elements.
// tessera::NAME_or_zeros takes the arguments of aten::NAME and the local sizes of each output. If the first tensor has
// no elements, its outputs are zeros of those sizes (often without elements too). Otherwise it calls aten::NAME.
namespace tessera {
namespace {

// The dtype of an output: that of the first tensor, its accumulation type, that of the parameters, that of indices, or
// uint64. Undefined: a tensor that the op does not set. QueryLength, KeyLength: an int, the size of dim 2 of the first
// or second tensor.
enum class OutputType : char {
  Same = 's',
  Accumulated = 'a',
  Parameters = 'p',  // CPU kernels of batch norm: float beside a bfloat16 input only if the parameters are
  Index = 'i',
  UInt64 = 'u',
  Undefined = '-',
  QueryLength = 'q',
  KeyLength = 'k'
};

struct OrZerosOp {
  const char* op;
  const char* overload;
  const char* types;  // one letter per output
  int mask;           // the argument with the output mask, or -1
};

bool is_int(char letter) {
  return letter == static_cast<char>(OutputType::QueryLength) || letter == static_cast<char>(OutputType::KeyLength);
}
size_t tensor_outputs(const OrZerosOp& row) {
  const std::string_view types(row.types);
  return types.size() - static_cast<size_t>(std::count_if(types.begin(), types.end(), is_int));
}

constexpr OrZerosOp kOrZerosOps[] = {
    {"_adaptive_avg_pool2d", "", "s", -1},
    {"_adaptive_avg_pool2d_backward", "", "s", -1},
    {"_native_batch_norm_legit", "", "spp", -1},
    {"_native_batch_norm_legit", "no_stats", "spp", -1},
    {"_scaled_dot_product_cudnn_attention", "", "sa--qkii-", -1},
    {"_scaled_dot_product_cudnn_attention_backward", "", "sss", -1},
    {"_scaled_dot_product_efficient_attention", "", "saii", -1},
    {"_scaled_dot_product_efficient_attention_backward", "", "ssss", 10},
    {"_scaled_dot_product_flash_attention", "", "sa--qkuus", -1},
    {"_scaled_dot_product_flash_attention_backward", "", "sss", -1},
    {"_scaled_dot_product_flash_attention_for_cpu", "", "sa", -1},
    {"_scaled_dot_product_flash_attention_for_cpu_backward", "", "sss", -1},
    {"avg_pool2d", "", "s", -1},
    {"avg_pool2d_backward", "", "s", -1},
    {"max_pool2d_with_indices", "", "si", -1},
    {"max_pool2d_with_indices_backward", "", "s", -1},
    {"native_batch_norm", "", "spp", -1},
    {"native_batch_norm_backward", "", "spp", 9},
    {"pixel_shuffle", "", "s", -1},
    {"pixel_unshuffle", "", "s", -1},
};

// The widest floating dtype of the arguments.
at::ScalarType widest_type(const torch::jit::Stack& stack, size_t arguments, at::ScalarType first) {
  auto widest = first;
  for (auto value = stack.end() - static_cast<ptrdiff_t>(arguments); value != stack.end(); ++value) {
    if (!value->isTensor() || !value->toTensor().defined() || !value->toTensor().is_floating_point()) continue;
    const auto type = value->toTensor().scalar_type();
    if (c10::elementSize(type) > c10::elementSize(widest)) widest = type;
  }
  return widest;
}

at::ScalarType output_type(char letter, const at::Tensor& tensor, const torch::jit::Stack& stack, size_t arguments) {
  const auto first = tensor.scalar_type();
  switch (static_cast<OutputType>(letter)) {
    case OutputType::Same:
      return first;
    case OutputType::Accumulated:
      return at::toOpMathType(first);
    case OutputType::Parameters:
      return tensor.is_cpu() ? widest_type(stack, arguments, first) : at::toOpMathType(first);
    case OutputType::Index:
      return at::kLong;
    case OutputType::UInt64:
      return at::kUInt64;
    case OutputType::Undefined:
    case OutputType::QueryLength:
    case OutputType::KeyLength:
      break;
  }
  return first;
}

class OrZeros final : public c10::OperatorKernel {
 public:
  OrZeros(const OrZerosOp& row, c10::OperatorHandle op) : row_(row), op_(std::move(op)) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    auto sizes = torch::jit::pop(*stack, tensor_outputs(row_));
    auto own = op_.schema().arguments().size();
    auto first = torch::jit::peek(*stack, 0, own).toTensor();
    if (first.numel() > 0) return op_.callBoxed(stack);
    std::vector<c10::IValue> results;
    size_t next = 0;  // of `sizes`
    for (size_t i = 0; row_.types[i] != 0; i++) {
      const char letter = row_.types[i];
      if (is_int(letter)) {
        const size_t from = letter == static_cast<char>(OutputType::KeyLength);
        results.emplace_back(torch::jit::peek(*stack, from, own).toTensor().size(2));
        continue;
      }
      const auto& size = sizes[next++];
      const bool wanted =
          letter != static_cast<char>(OutputType::Undefined) &&
          (row_.mask < 0 || torch::jit::peek(*stack, static_cast<size_t>(row_.mask), own).toBoolList()[i]);
      auto options = first.options().dtype(output_type(letter, first, *stack, own));
      results.emplace_back(wanted ? at::zeros(size.toIntVector(), options) : at::Tensor());
    }
    torch::jit::drop(*stack, own);
    for (auto& result : results) stack->push_back(std::move(result));
  }

 private:
  OrZerosOp row_;
  c10::OperatorHandle op_;
};

c10::FunctionSchema or_zeros_schema(const OrZerosOp& row, const c10::FunctionSchema& aten) {
  std::vector<c10::Argument> arguments;
  for (const auto& a : aten.arguments())  // none is keyword-only, because positional ones follow
    arguments.emplace_back(a.name(), a.type(), a.real_type(), a.N(), std::nullopt, false,
                           a.alias_info() ? std::optional(*a.alias_info()) : std::nullopt);
  for (size_t i = 0; i < tensor_outputs(row); i++)
    arguments.emplace_back("out" + std::to_string(i), c10::ListType::ofInts());
  return {std::string("tessera::") + row.op + "_or_zeros", row.overload, std::move(arguments), aten.returns()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  for (const auto& row : kOrZerosOps) {
    auto op = c10::Dispatcher::singleton().findSchema({std::string("aten::") + row.op, row.overload});
    if (!op) continue;
    auto schema = or_zeros_schema(row, op->schema());
    auto name = std::string(row.op) + "_or_zeros" + (*row.overload ? "." : "") + row.overload;
    m.def(std::move(schema));
    m.impl(name.c_str(),
           torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                           torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OrZeros>(row, *op))));
  }
}

}  // namespace tessera
