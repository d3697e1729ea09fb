#pragma once
#include "tessera/checkpoint/detail/manifest.h"
#include "tessera/comm/world.h"
#include "tessera/state/load_state_dict.h"

#include <string>

namespace tessera::dcp {

// Options of load().
struct LoadOptions {
  bool strict = true;       // missing names and wrong sizes are errors; false: reports them and loads the rest
  std::string prefix = "";  // loads only saved names with this prefix; the dict has them without it
  // Compares the checksums of the shards that are read, which reads these shards completely. false: a damaged file can
  // give wrong values. Checkpoints of other programs have no checksums.
  bool verify = true;
};

// Loads the checkpoint at `path` into the tensors of a state dict, by name (torch.distributed.checkpoint.load).
// Formats: see detail/checkpoint_source.h. The tensors keep their mesh, placements and dtype, on whichever mesh the
// checkpoint was saved. Each rank reads only the bytes that it needs; no tensor data is communicated. All checks come
// first, on all ranks: if it throws UsageError, it throws on all ranks and nothing has changed. All ranks must call it.
// Ranks on several hosts need a shared file system.
//
// Example:  auto dict = state_dict(*model);            // aliases of the parameters
//           dcp::load(dict, "out/step-1000");          // fills the parameters
//           auto step = dcp::read_values("out/step-1000").at("step");
LoadReport load(const StateDict& dict, const std::string& path, const LoadOptions& options = {},
                const World& world = World::current());

// A state dict to load optimizer state into before the first step, when the optimizer has no state yet: one tensor per
// saved name with `prefix`, with the saved dtype. A tensor with the sizes of its parameter (state.<parameter>.<entry>)
// gets the parameter's placements; all others are plain. Load into it, then pass it to set_optimizer_state_dict. `path`
// is a checkpoint, as load() takes it. Example:  auto state = dcp::optimizer_state_like("out/step-1000", "optimizer.",
// get_model_state_dict(*model));
StateDict optimizer_state_like(const std::string& path, const std::string& prefix, const StateDict& model);
StateDict optimizer_state_like(const Manifest& manifest, const std::string& prefix, const StateDict& model);

}  // namespace tessera::dcp
