#include "tessera/tensor_parallel/detail/plain_dropout.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/attention_of_scope.h"
#include "tessera/dtensor/detail/local_origin.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/replicated_over.h"
#include "tessera/placement/detail/shard.h"
#include "tessera/tensor_parallel/detail/context_state.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <optional>

namespace tessera {
namespace {

thread_local constinit const DeviceMesh* scope_mesh = nullptr;
thread_local constinit bool had_shard_without_history = false;
thread_local constinit size_t trace_with_such_a_shard = 0;  // CompilingScope::serial() of the last one

// Whether styles, and dropouts of LibTorch's kernel, ran outside of all modules that could say to which model they
// belong: forward of a root without a Tessera holder. Both: a dropout may belong to the parallelized model.
thread_local constinit bool style_ran_outside = false, dropout_ran_outside = false;

constexpr const char* kAttention = "scaled_dot_product_attention with dropout_p";

// What is known about the plain input of a dropout.
struct DropoutOrigin {
  DeviceMesh mesh;
  SpecRef spec;  // of the DTensor from which the input was computed; null: the input is replicated

  bool is_sharded() const { return spec && spec->placements[0].is_sharded(); }
};

// Compares two sums over the elements, one of them weighted by position.
bool is_equal_on_all_ranks(const at::Tensor& t, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto values = t.detach().reshape({-1}).to(at::kDouble).nan_to_num();
  const auto weights = at::linspace(1, 2, values.numel(), values.options());
  const auto sums = at::stack({values.sum(), values.dot(weights), at::full({}, values.numel(), values.options())});
  auto most = funcol::all_reduce(at::cat({sums, -sums}), ReduceOp::Max, mesh.get_group());
  funcol::wait(most, mesh.get_group());
  return at::equal(most.slice(0, 0, 3), -most.slice(0, 3, 6));
}

void check_is_replicated(const char* op, const at::Tensor& t, const DeviceMesh& mesh) {
  if (mesh.size() == 1) return;
  if (compiling() ? trace_with_such_a_shard != CompilingScope::serial()
                  : !(had_shard_without_history || recomputing()) || is_equal_on_all_ranks(t, mesh))
    return;
  TESSERA_FAIL(UsageError, op, in_module(), " on a plain tensor of sizes ", t.sizes(), ": ",
               compiling() ? c10::str("a compiled step cannot compare its values between the ranks of mesh(", mesh, ")")
                           : c10::str("its values differ between the ranks of mesh(", mesh, ")"),
               ", and without autograd history its placement is not known. Make it a submodule tessera::nn::Dropout ",
               "with a Prepare style in the plan, or pass a DTensor: use_local_output = false, or DTensor::from_local ",
               "with its placement. A checkpoint must begin before the shard is made");
}

void check_belongs_to_a_module() {
  TESSERA_CHECK(!(style_ran_outside && dropout_ran_outside), UsageError,
                "dropout and modules of a parallelized model run outside of the module that was parallelized",
                in_module(), ": it is not known whether the dropout belongs to that model, and every rank would draw ",
                "another mask. Call the parallelized module through its Tessera holder: write TESSERA_MODULE(Net) for ",
                "TORCH_MODULE(Net), and put this code into its forward");
}

std::optional<DropoutOrigin> dropout_origin(const at::Tensor& t, const char* op, const DeviceMesh& known_mesh) {
  if (scope_mesh) return DropoutOrigin{*scope_mesh, {}};
  if (auto spec = detail::local_origin(t); spec && is_tensor_parallel_mesh(spec->mesh))
    return DropoutOrigin{spec->mesh, std::move(spec)};
  if (auto mesh = known_mesh ? known_mesh : running_module_is_replicated_over()) {
    check_is_replicated(op, t, mesh);
    return DropoutOrigin{std::move(mesh), {}};
  }
  if (innermost_module()) return std::nullopt;  // of another model
  dropout_ran_outside = true;
  check_belongs_to_a_module();
  return std::nullopt;
}

// A placement, and the global sizes of the tensor that has it.
struct PlacedSizes {
  Placement placement;
  std::vector<int64_t> sizes;
};

[[noreturn]] void fail_unknown_placement(const char* op, const at::Tensor& t, const TensorSpec& origin) {
  TESSERA_FAIL(UsageError, op, in_module(), " on a plain tensor of sizes ", t.sizes(),
               ": it is computed from the local tensor of ", origin.describe(),
               ", so it is a shard, but its placement is not known and the mask would not be the one of the plain ",
               "module. Make it a submodule tessera::nn::Dropout with a Prepare style in the plan, or pass a DTensor: ",
               "use_local_output = false, or DTensor::from_local with its placement");
}

// An elementwise result of the local tensor: the sharded dim still has its local size.
PlacedSizes placed_like_origin(const char* op, const at::Tensor& t, const DropoutOrigin& origin) {
  PlacedSizes placed{Replicate(), t.sizes().vec()};
  if (!origin.is_sharded()) return placed;
  const auto& spec = *origin.spec;
  placed.placement = spec.placements[0];
  const auto dim = placed.placement.dim;
  if (static_cast<size_t>(t.dim()) != spec.sizes.size() || t.size(dim) != spec.local_sizes[dim])
    fail_unknown_placement(op, t, spec);
  placed.sizes[dim] = spec.sizes[dim];
  return placed;
}

at::Tensor as_dtensor(const at::Tensor& t, const DeviceMesh& mesh, const PlacedSizes& placed) {
  const auto strides = tessera::contiguous_strides(placed.sizes);
  return DTensor::from_local(t.contiguous(), mesh, {placed.placement},
                             {.shape = placed.sizes, .stride = std::vector<int64_t>(strides.begin(), strides.end())});
}

// The placement of attention weights (B, H, L, S) from that of the queries' origin. Usually this is a Linear with
// sharded output features: its features, in sections for a fused q, k, v, are complete heads.
PlacedSizes placed_attention(const at::Tensor& query, std::vector<int64_t> local_sizes, const DropoutOrigin& origin) {
  PlacedSizes placed{Replicate(), std::move(local_sizes)};
  if (!origin.is_sharded()) return placed;
  const auto& spec = *origin.spec;
  const auto& from = spec.placements[0];
  const auto dims = static_cast<int64_t>(spec.sizes.size()), heads = query.dim() - 3, width = query.size(-1);
  const auto n = origin.mesh.size(), rank = origin.mesh.get_coordinate()->at(0);
  if (from.dim == dims - 1 && heads >= 0 && width > 0) {
    const auto sections = from.kind == Placement::Kind::StridedShard ? from.factor : 1;
    const int64_t block = from.is_shard() ? from.factor : from.block;
    placed.placement = Shard(heads, std::max<int64_t>(block / width, 1));
    placed.sizes[heads] = spec.sizes[from.dim] / sections / width;
  } else if (from.dim == 0) {
    placed.placement = Shard(0);
    placed.sizes[0] = spec.sizes[0];
  } else {
    fail_unknown_placement(kAttention, query, spec);
  }
  const auto dim = placed.placement.dim;
  if (shard_size(placed.placement, placed.sizes[dim], n, rank) != query.size(dim))
    fail_unknown_placement(kAttention, query, spec);
  return placed;
}

at::Tensor call_composite(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& mask, double p, bool causal, std::optional<double> scale,
                          bool gqa) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::scaled_dot_product_attention", "");
  torch::jit::Stack stack{q, k, v, mask, p, causal, scale, gqa};
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
  return stack.back().toTensor();
}

// In the scope of a ContextParallel: over the tokens of all ranks. With dropout: as LibTorch's
// _scaled_dot_product_attention_math, with a mask that is drawn by global index.
at::Tensor attention(const at::Tensor& q, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double p, bool causal, std::optional<double> scale,
                     bool gqa) {
  if (const auto& context = current_context_parallel())
    return context_parallel_attention(context, q, key, value, mask, p, causal, scale, gqa, call_composite);
  const auto origin = p > 0 && p < 1 && q.dim() >= 3 ? dropout_origin(q, kAttention, {}) : std::nullopt;
  if (!origin) return call_composite(q, key, value, mask, p, causal, scale, gqa);
  const auto shared = gqa ? q.size(-3) / key.size(-3) : 1;
  const auto k = shared > 1 ? key.repeat_interleave(shared, -3) : key;
  const auto v = shared > 1 ? value.repeat_interleave(shared, -3) : value;
  const auto factor = std::sqrt(scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1)))));
  auto weights = (q * factor).matmul(k.transpose(-2, -1) * factor);
  if (causal) {
    const auto visible = at::ones({q.size(-2), k.size(-2)}, q.options().dtype(at::kBool)).tril();
    weights = weights.masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity());
  }
  if (mask && mask->defined())
    weights = mask->scalar_type() == at::kBool
                  ? weights.masked_fill(mask->logical_not(), -std::numeric_limits<double>::infinity())
                  : weights + *mask;
  weights = weights.softmax(-1);
  at::Tensor keep;
  {
    at::NoGradGuard no_grad;
    auto local = at::empty(weights.sizes(), weights.options());
    as_dtensor(local, origin->mesh, placed_attention(q, weights.sizes().vec(), *origin)).bernoulli_(1 - p);
    keep = local.div_(1 - p);
  }
  return (weights * keep).matmul(v);
}

// Attention on DTensors in the scope of a ContextParallel: each rank has its heads (tp) of its tokens (cp).
bool dtensor_attention(torch::jit::Stack& stack) {
  const auto& context = current_context_parallel();
  if (!context) return false;
  const auto args = torch::jit::last(stack, 8);
  at::Tensor result = context_parallel_attention_of_dtensors(
      context, args[0].toTensor(), args[1].toTensor(), args[2].toTensor(), args[3].toOptional<at::Tensor>(),
      args[4].toDouble(), args[5].toBool(), args[6].toOptional<double>(), args[7].toBool(), call_composite);
  torch::jit::drop(stack, 8);
  torch::jit::push(stack, std::move(result));
  return true;
}

// The ops that take (input, p, train), and their variants in place.
constexpr const char* kDropouts[] = {
    "dropout",       "dropout_",       "feature_dropout",       "feature_dropout_",
    "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"};

struct PlainDropout final : c10::OperatorKernel {
  explicit PlainDropout(std::string name) : name(std::move(name)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto args = torch::jit::last(*stack, 3);
    const at::Tensor self = args[0].toTensor();
    // An empty shard draws too: the ranks count their draws.
    const bool draws = args[2].toBool() && args[1].toDouble() > 0;
    const auto input = draws ? distributed_dropout_input(self, ("torch::" + name).c_str()) : at::Tensor();
    if (!input.defined()) return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    const bool in_place = name.back() == '_';
    const auto functional = c10::Dispatcher::singleton().findSchemaOrThrow(
        ("aten::" + (in_place ? name.substr(0, name.size() - 1) : name)).c_str(), "");
    torch::jit::Stack call{input, args[1], args[2]};
    functional.callBoxed(call);
    const auto result = DTensor(call.back().toTensor()).to_local();
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, in_place ? self.copy_(result) : result);
  }
  const std::string name;
};

// Kernels at these keys take precedence over the decomposition of a composite op. Never destroyed.
torch::Library& kernels_at(c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
}

}  // namespace

void install_plain_dropout() {
  static std::once_flag once;
  std::call_once(once, [] {
    constexpr const char* kSdpa = "scaled_dot_product_attention";
    for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
      auto& aten = kernels_at(key);
      for (const char* name : kDropouts)
        aten.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<PlainDropout>(name)));
      aten.impl(kSdpa, TORCH_FN(attention));
    }
    // Inference mode skips the autograd keys.
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA})
      kernels_at(key).impl(kSdpa, TORCH_FN(attention));
    detail::attention_of_scope = dtensor_attention;
  });
  dropout_ran_outside = false;  // earlier ones do not belong to the model that is being parallelized
}

PlainDropoutScope::PlainDropoutScope(const DeviceMesh& mesh) : before_(scope_mesh), mesh_(mesh) {
  install_plain_dropout();
  scope_mesh = &mesh_;
}
PlainDropoutScope::~PlainDropoutScope() { scope_mesh = before_; }

void note_style_runs(const DeviceMesh& mesh) {
  if (mesh.size() == 1 || is_parallelized_module_running()) return;
  style_ran_outside = true;
  check_belongs_to_a_module();
}

void note_local_tensor(const at::Tensor& local, const Placement& placement) {
  if (!placement.is_sharded() || local.grad_fn()) return;
  had_shard_without_history = true;
  if (compiling()) trace_with_such_a_shard = CompilingScope::serial();
}

at::Tensor distributed_dropout_input(const at::Tensor& t, const char* op, const DeviceMesh& mesh) {
  const auto origin = dropout_origin(t, op, mesh);
  return origin ? as_dtensor(t, origin->mesh, placed_like_origin(op, t, *origin)) : at::Tensor();
}

}  // namespace tessera
