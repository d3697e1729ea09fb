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
CompilingListener*& CompilingScope::listener() {
  thread_local CompilingListener* it = nullptr;
  return it;
}
CompilingScope::Of& CompilingScope::kind() {
  thread_local Of it = Of::Part;
  return it;
}
std::vector<CompilingScope::Guard>& CompilingScope::guards() {
  thread_local std::vector<Guard> it;
  return it;
}
std::vector<CompilingScope::AtEnd>& CompilingScope::ends() {
  thread_local std::vector<AtEnd> it;
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

void CompilingScope::end(bool finished) {
  while (!ends().empty()) {
    const auto call = std::move(ends().back());
    ends().pop_back();
    call(finished);
  }
}

void CompilingScope::finish() {
  if (depth() == 1) end(true);
}

CompilingScope::~CompilingScope() {
  if (depth() == 1) {
    try {
      end(false);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): an error is on its way already
    }
  }
  if (--depth() == 0) inner_leaves().clear();
  listener() = outer_;
  kind() = outer_of_;
}

bool compiling() { return CompilingScope::depth() > 0; }

}  // namespace tessera
