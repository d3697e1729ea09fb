#include "tessera/tracing/detail/number_input.h"

#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cstdint>

namespace tessera {
namespace {

constexpr uint64_t kSign = uint64_t{1} << 63;
constexpr uint64_t kMark = 0x7FF2'7E55'E2A0'0000;  // exponent of a NaN, quiet bit clear, a pattern, 21 bits of index
constexpr uint64_t kIndex = (uint64_t{1} << 21) - 1;

struct ProbeState {
  int depth = 0;  // of ops whose kernels run
  bool host_has_read = false;
};
ProbeState& probe() {
  thread_local ProbeState it;
  return it;
}

struct InsideKernel final : at::ObserverContext {};

// An op that is written in terms of others: its body decides by the values of its arguments, as the step itself does.
bool is_composite(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  if (!name) return false;
  const auto op = c10::Dispatcher::singleton().findOp(*name);
  return op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

std::unique_ptr<at::ObserverContext> before_op(const at::RecordFunction& call) {
  auto& state = probe();
  if (state.depth == 0) {
    if (std::fetestexcept(FE_INVALID)) state.host_has_read = true;
    if (is_composite(call)) return nullptr;
  }
  state.depth++;
  return std::make_unique<InsideKernel>();
}

void after_op(const at::RecordFunction&, at::ObserverContext* context) {
  if (context && --probe().depth == 0) std::feclearexcept(FE_INVALID);
}

}  // namespace

double number_mark(size_t index, bool negative) {
  return std::bit_cast<double>(kMark | (index & kIndex) | (negative ? kSign : 0));
}

std::optional<MarkedNumber> find_number_mark(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  if ((bits & ~(kSign | kIndex)) != kMark) return {};
  return MarkedNumber{static_cast<size_t>(bits & kIndex), (bits & kSign) != 0};
}

bool NumberProbe::is_possible() {
#ifdef __GLIBC__
  return (fegetexcept() & FE_INVALID) == 0;
#else
  return true;
#endif
}

NumberProbe::NumberProbe() {
  probe() = {};
  std::fegetexceptflag(&flags_, FE_INVALID);
  callback_ =
      at::addThreadLocalCallback(at::RecordFunctionCallback(before_op, after_op).scopes({at::RecordScope::FUNCTION}));
  std::feclearexcept(FE_INVALID);
}
NumberProbe::~NumberProbe() {
  at::removeCallback(callback_);
  std::fesetexceptflag(&flags_, FE_INVALID);
}

bool NumberProbe::host_has_read() const { return probe().host_has_read || std::fetestexcept(FE_INVALID) != 0; }

LiveNumberScope*& LiveNumberScope::current() {
  thread_local LiveNumberScope* it = nullptr;
  return it;
}
LiveNumberScope::LiveNumberScope(std::vector<const double*> variables, size_t first)
    : variables_(std::move(variables)), first_(first), outer_(current()) {
  current() = this;
}
LiveNumberScope::~LiveNumberScope() { current() = outer_; }

double LiveNumberScope::read(const double* variable) {
  any_read_ = true;
  const auto found = std::find(variables_.begin(), variables_.end(), variable);
  const auto index = first_ + static_cast<size_t>(found - variables_.begin());
  if (found == variables_.end()) variables_.push_back(variable);
  return substitutes_ && (only_ < 0 || static_cast<size_t>(only_) == index) ? number_mark(index, negative_) : *variable;
}

double read_live_number(const double* variable) {
  if (!compiling()) return *variable;
  if (auto* scope = LiveNumberScope::current()) return scope->read(variable);
  CompilingScope::add_guard([variable] { return std::bit_cast<int64_t>(*variable); });
  return *variable;
}

}  // namespace tessera
