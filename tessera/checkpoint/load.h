#pragma once
#include "tessera/checkpoint/detail/manifest.h"
#include "tessera/comm/world.h"
#include "tessera/state/load_state_dict.h"

#include <string>

namespace tessera::dcp {

struct LoadOptions {
  bool strict = true;  // names or sizes that do not fit are an error; else they are reported and the rest is loaded
  std::string prefix = "";  // only what was saved under names that begin so, which the dict has without it
  bool verify = false;      // checksums of the pieces that are needed are compared; they are read in whole for that
};

// Fills the tensors of a dict with what was saved at `path` (source.h says in which forms that may be), under their
// names. They keep their mesh and placements, whatever mesh it was saved on, and their dtype. Each rank reads the bytes
// that it needs, and no values are communicated.
// Everything is looked at first, on all ranks: where this throws UsageError it does so on all of them, and nothing was
// changed. All ranks call it. Ranks on several hosts need a file system that they share.
// Example:  auto dict = state_dict(*model);            // aliases of the parameters
//           dcp::load(dict, "out/step-1000");          // ... which are filled
//           auto step = dcp::read_values("out/step-1000").at("step");
LoadReport load(const StateDict& dict, const std::string& path, const LoadOptions& options = {},
                const World& world = World::current());

// A dict to load the state of an optimizer into that has made no step yet, and so has none: a tensor for each name that
// was saved under `prefix`, with its dtype. What has the sizes of the parameter it belongs to (state.<parameter>.<row>)
// lies as that does, all else is plain. Hand it to set_optimizer_state_dict when it is filled.
StateDict optimizer_state_like(const Manifest& manifest, const std::string& prefix, const StateDict& model);

}  // namespace tessera::dcp
