#include "tessera/nn/detail/deferred/record.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/random.h"
#include "tessera/dtensor/register.h"
#include "tessera/nn/detail/deferred/call.h"
#include "tessera/nn/detail/deferred/meta_run.h"
#include "tessera/nn/detail/deferred/op_recorder.h"

#include <ATen/core/enum_tag.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <mutex>

namespace tessera::detail::deferred {
namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// The tape of this thread exists as long as one of its tensors. A second deferred_init continues with it.
thread_local std::weak_ptr<Tape> last_tape;
thread_local std::shared_ptr<Tape> open_tape;
thread_local int depth = 0;

void replace_arguments(Stack* stack, const std::vector<IValue>& outputs, size_t arguments) {
  stack->resize(stack->size() - arguments);
  stack->insert(stack->end(), outputs.begin(), outputs.end());
}

// Runs the op with this fallback excluded.
void run_below_key(const DeferredCall& call, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kDeferredKey);
  call.op.callBoxed(*stack);
}

// torch::tensor({1, 2}) creates an empty tensor and writes to its memory. No other code creates one on the CPU with
// autograd excluded and ADInplaceOrView not excluded.
bool is_torch_tensor_literal(const DeferredCall& call) {
  static const c10::OperatorName empty("aten::empty", "memory_format");
  if (!(call.op.operator_name() == empty)) return false;
  const auto& device = call.arguments[*call.find("device")];
  const auto& excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return device.isDevice() && device.toDevice().is_cpu() && excluded.has(c10::DispatchKey::AutogradFunctionality) &&
         !excluded.has(c10::DispatchKey::ADInplaceOrView);
}

// Queries of sizes and the like work. item(), equal() and is_nonzero() need the value, and fail.
void query_metadata(const DeferredCall& call, Stack* stack) {
  try {
    run_below_key(call, stack);
  } catch (const c10::Error&) {
    TESSERA_FAIL(UsageError, call.name(), in_module(),
                 " needs the value of a tensor made in deferred_init, which has none before materialize(module). "
                 "Compute it from sizes and options instead, or call this op after materialize()");
  }
}

// The local shard of a distributed deferred tensor refers to the value of the full tensor, so it has other sizes.
bool is_view_of_local_shard(const DeferredCall& call) {
  return call.first && call.is_view() &&
         call.first_deferred.sizes() != c10::IntArrayRef(call.first->tape->value(call.first->value).sizes);
}

void view_local_shard(const DeferredCall& call, Stack* stack) {
  run_below_key(call, stack);
  const auto* shard = call.first_deferred.unsafeGetTensorImpl();
  each_tensor(stack->back(), [&](const at::Tensor& t) {
    if (t.sizes() == shard->sizes()) t.unsafeGetTensorImpl()->set_backend_meta(shard->get_backend_meta_intrusive_ptr());
  });
}

void check_recordable(const DeferredCall& call) {
  TESSERA_CHECK(recording() || call.is_view(), UsageError, call.name(), in_module(),
                " on a tensor made in deferred_init, which has no values yet. Call materialize(module) first. "
                "If the op belongs to the initialization, call it inside deferred_init([&] { ... })");
  TESSERA_CHECK(call.op.operator_name().name != "aten::set_", UsageError, "deferred_init: ", call.name(), in_module(),
                " replaces the memory of a deferred tensor, which has none; use set_data");
  TESSERA_CHECK(!call.first || !call.writes_real, UsageError, "deferred_init: ", call.name(), in_module(),
                " writes a deferred value to a real tensor that existed before; create that tensor inside ",
                "deferred_init");
}

void record(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const DeferredCall call(op, *stack);
  if (call.distributed)  // the op on local tensors calls this fallback again
    return op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDeferredKey), stack);
  if (recording() && op.hasTag(at::Tag::nondeterministic_seeded)) {
    TESSERA_CHECK(decompose(op, stack), UsageError, "deferred_init: ", call.name(), in_module(),
                  " generates random numbers that tessera::random does not support; use uniform_, normal_, "
                  "exponential_ or random_, or call it after materialize()");
    return;
  }
  const bool is_deferred = call.first || (recording() && call.is_factory() && !is_torch_tensor_literal(call));
  if (!is_deferred) return run_below_key(call, stack);
  if (!call.returns_tensors && !call.writes) return query_metadata(call, stack);
  if (is_view_of_local_shard(call)) return view_local_shard(call, stack);
  check_recordable(call);
  const auto tape = call.first ? call.first->tape : open_tape;
  const auto device = real_device(call, *tape);
  OpRecorder recorder(call, tape, device);
  const auto outputs = run_on_meta(call, device, stack);
  if (!outputs) return;
  recorder.finish(*outputs);
  replace_arguments(stack, *outputs, call.arguments.size());
}

// A random permutation: the argsort of n random numbers.
at::Tensor& randperm_out(c10::SymInt n, std::optional<at::Generator> generator, at::Tensor& out) {
  const auto numbers = at::empty({n.expect_int()}, at::kLong).random_(std::move(generator));
  return out.copy_(at::argsort(numbers, /*stable=*/true, 0, /*descending=*/false));
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    register_kernels();
    const auto library = [](const char* ns) -> torch::Library& {
      return *new torch::Library(torch::Library::IMPL, ns, kDeferredKey, __FILE__, __LINE__);
    };
    library("_").fallback(torch::CppFunction::makeFromBoxedFunction<&record>());
    std::unordered_set<std::string> done;
    auto& aten = library("aten");
    register_random_fills(aten, done);
    aten.impl("randperm.generator_out", TORCH_FN(randperm_out));
  });
}

}  // namespace

void enter_recording() {
  install();
  if (depth++ > 0) return;
  open_tape = last_tape.lock();
  if (!open_tape) last_tape = open_tape = std::make_shared<Tape>();
}

void leave_recording() {
  if (--depth == 0) open_tape.reset();
}

bool recording() { return depth > 0; }

}  // namespace tessera::detail::deferred
