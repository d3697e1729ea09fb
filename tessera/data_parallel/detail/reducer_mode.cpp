#include "tessera/data_parallel/detail/reducer_mode.h"

#include <ostream>
#include <utility>

namespace tessera {
namespace {

thread_local constinit ReducerMode thread_mode = ReducerMode::Buckets;
constexpr const char* kModeNames[] = {"buckets", "python_reducer", "python_reducer_without_compiled_forward"};

}  // namespace

std::ostream& operator<<(std::ostream& out, ReducerMode mode) { return out << kModeNames[static_cast<size_t>(mode)]; }

ReducerModeScope::ReducerModeScope(ReducerMode mode) : outer_(std::exchange(thread_mode, mode)) {}
ReducerModeScope::~ReducerModeScope() { thread_mode = outer_; }
ReducerMode ReducerModeScope::current() { return thread_mode; }

}  // namespace tessera
