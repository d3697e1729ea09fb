#pragma once

namespace tessera {

// True if Python's torch is loaded in this process. It installs its own autograd engine, which replaces ours.
bool python_torch_loaded();

}  // namespace tessera
