#pragma once

namespace tessera {

// Is Python's torch at work in this process? It installs an autograd engine of its own, which cannot stand beside ours.
bool python_torch_loaded();

}  // namespace tessera
