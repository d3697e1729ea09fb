#include "tessera/tensor_parallel/detail/token_mixing.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string_view>

namespace tessera {
namespace {

using TokenDim = TokenMixingCheck::TokenDim;
using Operand = TokenMixingCheck::Operand;

thread_local constinit TokenMixingCheck* innermost_check = nullptr;
thread_local constinit int64_t allowed = 0;

// How an op mixes the elements of a dim. An op that is not in the table treats the elements of each dim alone.
enum class Mixing : uint8_t {
  Attention,      // always
  Product,        // matrix product of the last two tensors; rows with columns, or a sum over the inner dim
  Softmax,        // over the argument "dim"
  AlongDim,       // over the argument "dim" or "dims"
  AlongFloats,    // the same; with integers it counts and sorts, as a router of experts does
  Normalization,  // over the last dims, as many as "normalized_shape" has
  Groups,         // over all dims but the first
  Window,         // over the dims from 2 on: of the weight where it is larger than 1
  Pad,            // over the last dims where "pad" is not zero
  Lookup,         // does not mix; the result has the dims of the last tensor
};
struct MixingOp {
  std::string_view name;
  Mixing mixing;
};
constexpr MixingOp kMixingOps[] = {
    {"_adaptive_avg_pool2d", Mixing::Window},
    {"_cudnn_rnn", Mixing::Attention},
    {"_cummax_helper", Mixing::AlongFloats},
    {"_cummin_helper", Mixing::AlongFloats},
    {"_efficient_attention_forward", Mixing::Attention},
    {"_fft_c2c", Mixing::AlongDim},
    {"_fft_c2r", Mixing::AlongDim},
    {"_fft_r2c", Mixing::AlongDim},
    {"_flash_attention_forward", Mixing::Attention},
    {"_log_softmax", Mixing::Softmax},
    {"_native_multi_head_attention", Mixing::Attention},
    {"_scaled_dot_product_attention_math", Mixing::Attention},
    {"_scaled_dot_product_cudnn_attention", Mixing::Attention},
    {"_scaled_dot_product_efficient_attention", Mixing::Attention},
    {"_scaled_dot_product_flash_attention", Mixing::Attention},
    {"_scaled_dot_product_flash_attention_for_cpu", Mixing::Attention},
    {"_softmax", Mixing::Softmax},
    {"_transformer_encoder_layer_fwd", Mixing::Attention},
    {"addmm", Mixing::Product},
    {"avg_pool2d", Mixing::Window},
    {"baddbmm", Mixing::Product},
    {"bmm", Mixing::Product},
    {"constant_pad_nd", Mixing::Pad},
    {"convolution", Mixing::Window},
    {"cumprod", Mixing::AlongFloats},
    {"cumsum", Mixing::AlongFloats},
    {"embedding", Mixing::Lookup},
    {"flip", Mixing::AlongDim},
    {"gru", Mixing::Attention},
    {"kthvalue", Mixing::AlongFloats},
    {"logcumsumexp", Mixing::AlongFloats},
    {"logsumexp", Mixing::Softmax},
    {"lstm", Mixing::Attention},
    {"max_pool2d_with_indices", Mixing::Window},
    {"median", Mixing::AlongFloats},
    {"mkldnn_rnn_layer", Mixing::Attention},
    {"mm", Mixing::Product},
    {"mode", Mixing::AlongFloats},
    {"native_group_norm", Mixing::Groups},
    {"native_layer_norm", Mixing::Normalization},
    {"reflection_pad1d", Mixing::Pad},
    {"replication_pad1d", Mixing::Pad},
    {"rnn_relu", Mixing::Attention},
    {"rnn_tanh", Mixing::Attention},
    {"roll", Mixing::AlongDim},
    {"sort", Mixing::AlongFloats},
    {"topk", Mixing::AlongFloats},
};
static_assert(std::ranges::is_sorted(kMixingOps, {}, &MixingOp::name));

std::string_view base_name(const c10::OperatorHandle& op) {
  std::string_view name = op.operator_name().name;
  if (name.starts_with("aten::")) name.remove_prefix(6);
  if (name.ends_with('_')) name.remove_suffix(1);  // in place
  return name;
}

std::optional<Mixing> mixing_of(const c10::OperatorHandle& op) {
  const std::string_view name = base_name(op);
  const auto* found = std::ranges::lower_bound(kMixingOps, name, {}, &MixingOp::name);
  if (found == std::end(kMixingOps) || found->name != name) return std::nullopt;
  return found->mixing;
}

[[noreturn]] void fail(const c10::OperatorHandle& op, const char* what) {
  TESSERA_FAIL(
      UsageError, op.operator_name().name, in_module(), " in a ContextParallel ", what,
      ", and this rank has only a part of the tokens. Attention: call torch::scaled_dot_product_attention(q, k, ",
      "v), which attends to the tokens of all ranks, instead of torch::nn::MultiheadAttention, ",
      "torch::nn::Transformer, multi_head_attention_forward or a product and a softmax. If the op shall see ",
      "only the tokens of this rank, write ContextParallelOptions::check_ops = false");
}

// The named argument, or null.
const c10::IValue* argument(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args, std::string_view name) {
  const auto& declared = op.schema().arguments();
  for (size_t i = 0; i < declared.size() && i < args.size(); ++i)
    if (declared[i].name() == name) return &args[i];
  return nullptr;
}

// The dims that the arguments "dim" or "dims" name, of `ndim`; without them or if they are empty, all.
std::vector<int64_t> dims_argument(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args, int64_t ndim) {
  std::vector<int64_t> dims;
  for (const char* name : {"dim", "dims"}) {
    const c10::IValue* value = argument(op, args, name);
    if (value && value->isInt()) dims.push_back(value->toInt());
    if (value && value->isIntList()) dims = value->toIntVector();
  }
  if (dims.empty())
    for (int64_t d = 0; d < ndim; ++d) dims.push_back(d);
  for (int64_t& d : dims)
    if (d < 0) d += ndim;
  return dims;
}

bool any_tokens(const Operand& x, int64_t begin, int64_t end) {
  for (int64_t d = std::max<int64_t>(begin, 0); d < end && d < x.tensor.dim(); ++d)
    if (x.dims[d].is_tokens()) return true;
  return false;
}

void check_along_dims(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args, const Operand& x, Mixing mixing) {
  if (mixing == Mixing::AlongFloats && !x.tensor.is_floating_point()) return;
  for (const int64_t d : dims_argument(op, args, x.tensor.dim())) {
    if (d < 0 || d >= x.tensor.dim() || x.dims[d].inner == 0) continue;
    if (!x.dims[d].suspect) fail(op, "runs over the tokens of a sequence");
    if (mixing == Mixing::Softmax)
      fail(op,
           "is a softmax of a product of activations, which looks like attention (tensors that come from "
           "ContextParallel::shard are known better)");
  }
}

// a (.., rows, inner) times b (.., inner, columns): the dims of the result.
std::vector<TokenDim> check_product(const c10::OperatorHandle& op, const Operand& a, const Operand& b) {
  const int64_t n = a.tensor.dim();
  const bool batched = n == 3;
  const auto &rows = a.dims[n - 2], &columns = b.dims[n - 1], &left = a.dims[n - 1], &right = b.dims[n - 2];
  if (rows.is_tokens() && columns.is_tokens()) fail(op, "multiplies the tokens of a sequence with each other");
  // The sum over tokens of two tensors is a statistic without a batch (a router counts tokens), or linear attention.
  if (left.is_tokens() != right.is_tokens() || (batched && left.is_tokens()))
    fail(op, "sums over the tokens of a sequence");
  std::vector<TokenDim> result(n);
  if (batched) result[0] = a.dims[0].inner ? a.dims[0] : b.dims[0];
  result[n - 2] = rows;
  result[n - 1] = columns;
  const auto knows_nothing = [](const Operand& x) {
    return std::ranges::none_of(x.dims, [](const TokenDim& d) { return d.is_tokens(); });
  };
  if (batched && knows_nothing(a) && knows_nothing(b) && a.tensor.stride(0) != 0 && b.tensor.stride(0) != 0 &&
      a.tensor.size(1) > 1 && b.tensor.size(2) > 1)
    result[2] = {.inner = 1, .count = b.tensor.size(2), .suspect = true};
  return result;
}

void check_window(const c10::OperatorHandle& op, const std::vector<Operand>& operands) {
  const Operand& x = operands[0];
  if (base_name(op) != "convolution") {  // pooling: (C, H, W) or (N, C, H, W)
    if (any_tokens(x, x.tensor.dim() - 2, x.tensor.dim())) fail(op, "has windows over the tokens of a sequence");
    return;
  }
  for (int64_t d = 2; d < x.tensor.dim() && operands.size() > 1; ++d)
    if (x.dims[d].is_tokens() && operands[1].tensor.size(d) > 1) fail(op, "has windows over the tokens of a sequence");
}

void check_pad(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args, const Operand& x) {
  const c10::IValue* value = argument(op, args, base_name(op) == "constant_pad_nd" ? "pad" : "padding");
  if (!value || !value->isIntList() || !x.tensor.is_floating_point()) return;
  const auto pad = value->toIntVector();  // before and after, for the last dim first
  for (size_t i = 0; i < pad.size(); ++i)
    if (const int64_t d = x.tensor.dim() - 1 - static_cast<int64_t>(i / 2);
        pad[i] != 0 && d >= 0 && x.dims[d].is_tokens())
      fail(op, "shifts or pads the tokens of a sequence");
}

// The dims of a result of an op without an own rule. The dims of inputs and results correspond from the last on, as in
// broadcasting, without those that a reduction removed.
std::vector<TokenDim> aligned_dims(const c10::OperatorHandle& op, c10::ArrayRef<int64_t> removed,
                                   const std::vector<Operand>& operands, const at::Tensor& result) {
  std::vector<TokenDim> dims(result.dim());
  const bool joins = base_name(op) == "cat";
  for (const Operand& x : operands) {
    std::vector<int64_t> kept;
    for (int64_t d = 0; d < x.tensor.dim(); ++d)
      if (x.tensor.dim() <= result.dim() || std::ranges::find(removed, d) == removed.end()) kept.push_back(d);
    const int64_t shift = result.dim() - static_cast<int64_t>(kept.size());
    for (size_t i = 0; i < kept.size(); ++i) {
      const int64_t to = static_cast<int64_t>(i) + shift;
      const TokenDim& from = x.dims[kept[i]];
      if (to < 0 || from.inner == 0 || (!joins && x.tensor.size(kept[i]) != result.size(to))) continue;
      if (!dims[to].is_tokens()) dims[to] = from;
    }
  }
  return dims;
}

void collect(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  const auto add = [&](const at::Tensor& x) {
    if (x.defined()) tensors.push_back(x);
  };
  if (value.isTensor()) {
    add(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& x : value.toTensorVector()) add(x);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef())
      if (each.isTensor()) add(each.toTensor());
  }
}

// The composite RNNs select one token after the other, so the ops below them mix nothing.
struct CheckedRnn final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (innermost_check && allowed == 0) fail(op, "runs over the tokens of a sequence");
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  }
};

void install_checked_rnns() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::CPU,
                           c10::DispatchKey::CUDA}) {
      auto& aten = *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);  // never destroyed
      for (const char* name : {"gru.data", "gru.input", "lstm.data", "lstm.input", "rnn_relu.data", "rnn_relu.input",
                               "rnn_tanh.data", "rnn_tanh.input"})
        aten.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CheckedRnn>()));
    }
  });
}

}  // namespace

TokenMixingCheck::TokenMixingCheck() : outer_check_(innermost_check), scope_(*this) {
  install_checked_rnns();
  innermost_check = this;
}
TokenMixingCheck::~TokenMixingCheck() { innermost_check = outer_check_; }
TokenMixingCheck* TokenMixingCheck::current() { return innermost_check; }

TokenMixingAllowed::TokenMixingAllowed() { ++allowed; }
TokenMixingAllowed::~TokenMixingAllowed() { --allowed; }

bool TokenMixingCheck::is_known(const at::Tensor& x) const {
  return x.has_storage() && known_.contains(x.storage().unsafeGetStorageImpl());
}

Operand TokenMixingCheck::operand_of(const at::Tensor& x) const {
  Operand operand{x, std::vector<TokenDim>(x.dim())};
  if (known_.empty() || !x.has_storage() || x.layout() != at::kStrided) return operand;
  const auto found = known_.find(x.storage().unsafeGetStorageImpl());
  if (found == known_.end()) return operand;
  const auto item = static_cast<int64_t>(x.itemsize());
  for (const TokenLayout& layout : found->second.layouts)
    for (int64_t d = 0; d < x.dim(); ++d) {
      const int64_t size = x.size(d), step = x.stride(d) * item;
      const bool moves =
          size > 1 && step > 0 &&
          (step < layout.bytes ? (size - 1) * step >= layout.bytes : step % (layout.bytes * layout.count) != 0);
      if (moves && !operand.dims[d].is_tokens())
        operand.dims[d] = {std::max<int64_t>(layout.bytes / step, 1), layout.count, layout.suspect};
    }
  return operand;
}

void TokenMixingCheck::note(const at::Tensor& x, const std::vector<TokenDim>& dims) {
  if (!x.has_storage() || x.layout() != at::kStrided) return;
  std::vector<TokenLayout> layouts;
  for (int64_t d = 0; d < x.dim(); ++d) {
    const int64_t inner = dims[d].inner, size = x.size(d);
    if (inner == 0 || size <= inner || x.stride(d) == 0) continue;
    const bool complete = size % (inner * dims[d].count) == 0;
    layouts.push_back({.bytes = inner * x.stride(d) * static_cast<int64_t>(x.itemsize()),
                       .count = complete ? dims[d].count : size / inner,
                       .suspect = dims[d].suspect});
  }
  if (layouts.empty()) return;
  const auto& storage = x.storage().getWeakStorageImpl();
  known_.insert_or_assign(x.storage().unsafeGetStorageImpl(), Known{storage, std::move(layouts)});
  if (known_.size() < next_cleanup_) return;
  std::erase_if(known_, [](const auto& item) { return item.second.storage.expired(); });
  next_cleanup_ = 2 * known_.size() + 256;
}

void TokenMixingCheck::note_tokens(const at::Tensor& x, int64_t dim) {
  std::vector<TokenDim> dims(x.dim());
  TokenDim& tokens = dims[dim < 0 ? dim + x.dim() : dim];
  tokens = {.inner = 1, .count = x.size(dim)};
  note(x, dims);
}

void TokenMixingCheck::run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool of_dtensors = keys.has_backend(c10::BackendComponent::PrivateUse3Bit);  // their local ops are checked
  if (allowed > 0 || of_dtensors || torch::autograd::get_current_graph_task_id() >= 0) return next(op, keys, stack);
  const auto mixing = mixing_of(op);
  // In inference mode, modes see composite ops. The ops that they are made of are checked. Composite ops with a kernel
  // (context-parallel attention, RNNs) know the scope.
  const bool has_kernel = op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  if (!has_kernel && mixing != Mixing::Attention &&
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
    return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  const auto args = torch::jit::last(*stack, op.schema().arguments().size());
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& each : args) collect(each, tensors);
  if (mixing == Mixing::Attention) fail(op, "runs over the tokens of a sequence");
  const bool is_product = mixing == Mixing::Product;
  if (tensors.empty() || (!is_product && std::ranges::none_of(tensors, [&](const auto& x) { return is_known(x); })))
    return next(op, keys, stack);

  std::vector<Operand> operands;
  for (const at::Tensor& x : tensors) operands.push_back(operand_of(x));
  std::optional<std::vector<TokenDim>> product;
  const Operand& x = operands[0];
  if (is_product && operands.size() > 1) {
    const Operand &a = operands[operands.size() - 2], &b = operands.back();
    product = check_product(op, a, b);
  } else if (mixing == Mixing::Softmax || mixing == Mixing::AlongDim || mixing == Mixing::AlongFloats) {
    check_along_dims(op, args, x, *mixing);
  } else if (mixing == Mixing::Normalization) {
    const c10::IValue* shape = argument(op, args, "normalized_shape");
    const auto last = shape && shape->isIntList() ? static_cast<int64_t>(shape->toIntVector().size()) : 1;
    if (any_tokens(x, x.tensor.dim() - last, x.tensor.dim())) fail(op, "normalizes over the tokens of a sequence");
  } else if (mixing == Mixing::Groups) {
    if (any_tokens(x, 1, x.tensor.dim())) fail(op, "normalizes over the tokens of a sequence");
  } else if (mixing == Mixing::Window) {
    check_window(op, operands);
  } else if (mixing == Mixing::Pad) {
    check_pad(op, args, x);
  }
  const std::vector<int64_t> removed = dims_argument(op, args, x.tensor.dim());
  next(op, keys, stack);

  std::vector<at::Tensor> results;
  for (const c10::IValue& each : torch::jit::last(*stack, op.schema().returns().size())) collect(each, results);
  for (const at::Tensor& result : results) {
    if (is_known(result)) continue;  // a view, or written in place
    if (product) {
      note(result, *product);
    } else if (mixing == Mixing::Lookup) {  // (dims of the indices, features)
      std::vector<TokenDim> dims = operands.back().dims;
      dims.resize(result.dim());
      note(result, dims);
    } else {
      note(result, aligned_dims(op, removed, operands, result));
    }
  }
}

}  // namespace tessera
