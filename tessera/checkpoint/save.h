#pragma once
#include "tessera/checkpoint/detail/manifest.h"
#include "tessera/comm/world.h"
#include "tessera/state/state_dict.h"

#include <functional>
#include <string>
#include <string_view>

namespace tessera::dcp {

struct SaveOptions {
  bool overwrite = false;   // what is there under this name already is replaced, at one instant
  int64_t keep_latest = 0;  // of a step folder: how many stay of those up to it, itself included; 0: all
  bool sync = true;         // on the disk before it counts; without, a crash of the whole machine may lose it
  // Told what has been done, for progress and tests of crashes: "planned", "piece" (after each), "written" on every
  // rank; "complete", "renamed" on the first.
  std::function<void(std::string_view)> on_stage = {};
};

// Saves tensors and values as the folder `path`, which any number of ranks, on any mesh, and Python's
// torch.distributed.checkpoint (HuggingFaceStorageReader) can load. Tensors are plain or distributed, in any placements
// but Partial; plain ones are taken to be the same on every rank that has them. Each piece is written once, replicas
// share the work (save_plan.h). The folder must be one that all ranks see.
//
// It is written under another name beside and gets its own when everything is on the disk and all ranks say so: a crash
// at any instant leaves the checkpoint before as it was. What a crash left behind is removed by the next save.
// All ranks call it. Throws, on all of them, UsageError if a rank cannot do its part (a full disk); what was at `path`
// is there still, or nothing is. (If old ones cannot be removed, that is an error, too, but the new one stands.) Values
// are the first rank's.
// Example:  dcp::save(state_dict(*model), dcp::step_folder("out", 1000), {{"step", 1000}});
void save(const StateDict& dict, const std::string& path, const Values& values = {}, const SaveOptions& options = {},
          const World& world = World::current());

}  // namespace tessera::dcp
