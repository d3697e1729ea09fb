#pragma once
#include "tessera/checkpoint/detail/manifest.h"
#include "tessera/comm/world.h"
#include "tessera/state/state_dict.h"

#include <functional>
#include <string>
#include <string_view>

namespace tessera::dcp {

// Options of save().
struct SaveOptions {
  bool overwrite = false;   // replaces an existing checkpoint of this name, atomically
  int64_t keep_latest = 0;  // for step folders: keeps this many checkpoints up to this one, itself included; 0: all
  bool sync = true;         // fsync before the rename; without it, a crash of the machine may lose the checkpoint
  // Called after each stage, for progress and crash tests: "planned", "shard" (after each one), "written" on every
  // rank; "complete", "renamed" on rank 0.
  std::function<void(std::string_view)> on_stage = {};
};

// Saves a state dict and values as the folder `path` (torch.distributed.checkpoint.save). Any number of ranks on any
// mesh can load it, and so can Python's DCP (HuggingFaceStorageReader). Tensors may be plain or distributed with any
// placements except Partial. Plain tensors are taken to be equal on all ranks that have them. Each shard is written
// once; replicas share the work (detail/save_plan.h). All ranks must see the folder.
//
// The data is written to `path`.partial, which is renamed when all ranks have written everything to disk. So a crash at
// any time leaves older checkpoints intact. The next save removes what a crash left.
// All ranks must call it. If a rank fails, all ranks throw, and `path` is unchanged: SystemError if the disk is full or
// fails, UsageError for a wrong path or dict. (If an old checkpoint cannot be removed, it throws too, but the new one
// is complete.) Values are those of rank 0. Example:  dcp::save(state_dict(*model), dcp::step_folder("out", 1000),
// {{"step", 1000}});
void save(const StateDict& dict, const std::string& path, const Values& values = {}, const SaveOptions& options = {},
          const World& world = World::current());

}  // namespace tessera::dcp
