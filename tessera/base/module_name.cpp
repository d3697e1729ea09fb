#include "tessera/base/module_name.h"

#include <utility>

namespace tessera {
namespace {
thread_local constinit const ModuleNameScope* innermost = nullptr;
}  // namespace

ModuleNameScope::ModuleNameScope(std::string name) : name_(std::move(name)), outer_(innermost) { innermost = this; }
ModuleNameScope::~ModuleNameScope() { innermost = outer_; }

std::string_view running_module() { return innermost ? std::string_view(innermost->name_) : std::string_view(); }

}  // namespace tessera
