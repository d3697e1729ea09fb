#pragma once

namespace tessera::detail {

// Makes sure that autograd's engine is ours, which asks the packers of saved_tensor_hooks.h. Installed when the library
// is loaded, before any backward, unless Python's torch is there. Throws UsageError where it cannot be.
void require_engine();

}  // namespace tessera::detail
