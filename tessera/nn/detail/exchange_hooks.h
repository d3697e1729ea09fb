#pragma once
#include "tessera/nn/hooks.h"

#include <memory>

namespace tessera::detail {

// Replaces all hooks of a module and returns the previous ones. Null: no hooks. The handles of the previous hooks stay
// valid while the result exists.
std::shared_ptr<ModuleHooks> exchange_hooks(HookPoint& point, std::shared_ptr<ModuleHooks> hooks);

}  // namespace tessera::detail
