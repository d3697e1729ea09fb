#include "tessera/tracing/op_mode.h"

#include "tessera/base/error.h"
#include "tessera/tracing/detail/tracer_key.h"

#include <c10/core/AutogradState.h>
#include <torch/library.h>

#include <mutex>

namespace tessera {
namespace {

thread_local constinit OpMode* innermost = nullptr;

void run_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTracerKey);
  // For a distributed op, modes also see the ops on its local tensors.
  if (keys.has_backend(c10::BackendComponent::PrivateUse3Bit)) return op.redispatchBoxed(below, stack);
  const OpModesOff only_the_op;
  op.redispatchBoxed(below, stack);
}

void run_innermost_mode(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  TESSERA_CHECK(
      innermost, UsageError, op.schema().name(),
      " runs on a thread that was started by a thread with an active op mode (a recorder or a tracer), which does not "
      "see the op; run it on the thread with the mode");
  innermost->run(op, keys, stack);
}

void register_fallback() {
  static std::once_flag once;
  std::call_once(once, [] {  // never destroyed, because ops run until the process ends
    auto* library = new torch::Library(torch::Library::IMPL, "_", kTracerKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&run_innermost_mode>());
  });
}

}  // namespace

void OpMode::next(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
  if (outer_)
    outer_->run(op, keys, stack);
  else
    run_kernel(op, keys, stack);
}

OpModeScope::OpModeScope(OpMode& mode)
    : outer_(innermost),
      was_included_(tracing()),
      had_threads_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) {
  register_fallback();
  mode.outer_ = innermost;
  innermost = &mode;
  c10::impl::tls_set_dispatch_key_included(kTracerKey, true);
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}
OpModeScope::~OpModeScope() {
  innermost = outer_;
  c10::AutogradState::get_tls_state().set_multithreading_enabled(had_threads_);
  c10::impl::tls_set_dispatch_key_included(kTracerKey, was_included_);
}

OpModesOff::OpModesOff() : was_excluded_(c10::impl::tls_is_dispatch_key_excluded(kTracerKey)) {
  c10::impl::tls_set_dispatch_key_excluded(kTracerKey, true);
}
OpModesOff::~OpModesOff() { c10::impl::tls_set_dispatch_key_excluded(kTracerKey, was_excluded_); }

}  // namespace tessera
