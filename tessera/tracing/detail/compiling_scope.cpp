#include "tessera/tracing/detail/compiling_scope.h"

#include <exception>
#include <utility>

namespace tessera {

int& CompilingScope::depth() {
  thread_local int it = 0;
  return it;
}
size_t& CompilingScope::counter() {
  thread_local size_t it = 0;
  return it;
}
TraceObserver*& CompilingScope::current_observer() {
  thread_local TraceObserver* it = nullptr;
  return it;
}
CompilingScope::Region& CompilingScope::current_region() {
  thread_local Region it = Region::Part;
  return it;
}
std::vector<CompilingScope::Guard>& CompilingScope::guards() {
  thread_local std::vector<Guard> it;
  return it;
}
std::vector<CompilingScope::TraceEndCallback>& CompilingScope::trace_end_callbacks() {
  thread_local std::vector<TraceEndCallback> it;
  return it;
}
std::vector<CompilingScope::Effect>& CompilingScope::effects() {
  thread_local std::vector<Effect> it;
  return it;
}

std::unordered_set<const void*>& CompilingScope::inner_leaves() {
  thread_local std::unordered_set<const void*> it;
  return it;
}

std::vector<CompilingScope::Guard> CompilingScope::take_guards() { return std::exchange(guards(), {}); }
std::vector<CompilingScope::Effect> CompilingScope::take_effects() { return std::exchange(effects(), {}); }

void CompilingScope::run_trace_end_callbacks(bool finished) {
  while (!trace_end_callbacks().empty()) {
    const auto call = std::move(trace_end_callbacks().back());
    trace_end_callbacks().pop_back();
    call(finished);
  }
}

void CompilingScope::finish() {
  if (depth() == 1) run_trace_end_callbacks(true);
}

CompilingScope::~CompilingScope() {
  if (depth() == 1) {
    try {
      run_trace_end_callbacks(false);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): another error is in flight
    }
  }
  if (--depth() == 0) inner_leaves().clear();
  current_observer() = outer_;
  current_region() = outer_region_;
}

bool compiling() { return CompilingScope::depth() > 0; }

}  // namespace tessera
