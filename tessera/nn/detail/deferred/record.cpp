#include "tessera/nn/detail/deferred/record.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/module_name.h"
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

// The tape of this thread lives as long as a tensor that is on it, so that a second deferred_init goes on with it.
thread_local std::weak_ptr<Tape> last_tape;
thread_local std::shared_ptr<Tape> open_tape;
thread_local int depth = 0;

void replace_arguments(Stack* stack, const std::vector<IValue>& by, size_t arguments) {
  stack->resize(stack->size() - arguments);
  stack->insert(stack->end(), by.begin(), by.end());
}

// The op on its arguments as they are; does not come here again.
void run_below(const DeferredCall& call, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kDeferredKey);
  call.op.callBoxed(*stack);
}

// torch::tensor({1, 2}) asks for an empty tensor and writes into its memory. Nobody else asks for one on the CPU with
// autograd off and views on.
bool is_for_values_at_hand(const DeferredCall& call) {
  static const c10::OperatorName empty("aten::empty", "memory_format");
  if (!(call.op.operator_name() == empty)) return false;
  const auto& device = call.arguments[*call.find("device")];
  const auto& excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return device.isDevice() && device.toDevice().is_cpu() && excluded.has(c10::DispatchKey::AutogradFunctionality) &&
         !excluded.has(c10::DispatchKey::ADInplaceOrView);
}

// Sizes and the like are answered. With item(), equal(), is_nonzero() a value would leave for the host.
void answer(const DeferredCall& call, Stack* stack) {
  try {
    run_below(call, stack);
  } catch (const c10::Error&) {
    TESSERA_FAIL(UsageError, call.name(), in_module(),
                 " asks for the value of a tensor made in deferred_init, which has none before materialize(module). "
                 "Compute it from sizes and options instead, or do this after materialize()");
  }
}

// A rank's piece of a deferred tensor stands for the whole of it as long as it is not looked into.
bool is_view_of_piece(const DeferredCall& call) {
  return call.first && call.is_view() &&
         call.first_deferred.sizes() != c10::IntArrayRef(call.first->tape->value(call.first->value).sizes);
}

void view_piece(const DeferredCall& call, Stack* stack) {
  run_below(call, stack);
  const auto* piece = call.first_deferred.unsafeGetTensorImpl();
  each_tensor(stack->back(), [&](const at::Tensor& t) {
    if (t.sizes() == piece->sizes()) t.unsafeGetTensorImpl()->set_backend_meta(piece->get_backend_meta_intrusive_ptr());
  });
}

void check_recordable(const DeferredCall& call) {
  TESSERA_CHECK(recording() || call.is_view(), UsageError, call.name(), in_module(),
                " on a tensor made in deferred_init, which has no values yet. Call materialize(module) first; "
                "what belongs to the initialisation goes inside: deferred_init([&] { ... })");
  TESSERA_CHECK(call.op.operator_name().name != "aten::set_", UsageError, "deferred_init: ", call.name(), in_module(),
                " exchanges the memory of a tensor that has none; use set_data");
  TESSERA_CHECK(!call.first || !call.writes_real, UsageError, "deferred_init: ", call.name(), in_module(),
                " writes a deferred value into a real tensor, which was made before; make it inside deferred_init");
}

void record(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const DeferredCall call(op, *stack);
  if (call.distributed)  // its pieces come here again
    return op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDeferredKey), stack);
  if (recording() && op.hasTag(at::Tag::nondeterministic_seeded)) {
    TESSERA_CHECK(decompose(op, stack), UsageError, "deferred_init: ", call.name(), in_module(),
                  " draws numbers that tessera::random has no fill for; make them of uniform_, normal_, "
                  "exponential_ or random_, or do this after materialize()");
    return;
  }
  const bool is_deferred = call.first || (recording() && call.is_factory() && !is_for_values_at_hand(call));
  if (!is_deferred) return run_below(call, stack);
  if (!call.returns_tensors && !call.writes) return answer(call, stack);
  if (is_view_of_piece(call)) return view_piece(call, stack);
  check_recordable(call);
  const auto tape = call.first ? call.first->tape : open_tape;
  const auto device = real_device(call, *tape);
  Writer writer(call, tape, device);
  const auto results = run_on_meta(call, device, stack);
  if (!results) return;
  writer.finish(*results);
  replace_arguments(stack, *results, call.arguments.size());
}

// A permutation is the order of so many random numbers.
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
