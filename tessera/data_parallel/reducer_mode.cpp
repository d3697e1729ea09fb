#include "tessera/data_parallel/reducer_mode.h"

#include <ostream>
#include <utility>

namespace tessera {
namespace {

thread_local constinit ReducerMode mode_now = ReducerMode::Buckets;
constexpr const char* kNames[] = {"buckets", "python_reducer", "python_reducer_without_compiled_forward"};

}  // namespace

std::ostream& operator<<(std::ostream& out, ReducerMode mode) { return out << kNames[static_cast<size_t>(mode)]; }

ReducerModeScope::ReducerModeScope(ReducerMode mode) : outer_(std::exchange(mode_now, mode)) {}
ReducerModeScope::~ReducerModeScope() { mode_now = outer_; }
ReducerMode ReducerModeScope::current() { return mode_now; }

}  // namespace tessera
