#pragma once
#include "tessera/checkpoint/detail/manifest.h"
#include "tessera/comm/world.h"
#include "tessera/state/state_dict.h"

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace tessera::dcp {

// Options of save().
struct SaveOptions {
  bool overwrite = false;   // replaces an existing checkpoint of this name, atomically
  int64_t keep_latest = 0;  // for step folders: keeps this many checkpoints up to this one, itself included; 0: all
  bool sync = true;         // fsync before the rename; without it, a crash of the machine may lose the checkpoint
  // Keeps the files of one replaced or superfluous checkpoint until the next save, which overwrites them: half the time
  // of a save, for the disk space of one checkpoint more. Files that a process has open, or that have a second name,
  // are never overwritten. False: they are removed in the background.
  bool reuse_files = true;
  // Of async_save: copies the tensors in the background, too (PyTorch: StagingOptions.use_async_staging). The caller
  // must call AsyncSave::wait_staging() before it changes them.
  bool async_staging = false;
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
// any time leaves older checkpoints intact. The next save overwrites or removes what a crash left.
// All ranks must call it. If a rank fails, all ranks throw, and `path` is unchanged: SystemError if the disk is full or
// fails, UsageError for a wrong path or dict. Values are those of rank 0. Old checkpoints are left to
// the next save (SaveOptions::reuse_files), or removed in the background; the next save throws if that fails.
// Example:  ts::dcp::save(dict, ts::dcp::step_folder("out", 1000), {{"step", 1000}}, options);
void save(const StateDict& dict, const std::string& path, const Values& values = {}, const SaveOptions& options = {},
          const World& world = World::current());

// A save in the background: the future that torch.distributed.checkpoint.async_save returns. The destructor waits; an
// error that no wait() has thrown becomes a warning.
class AsyncSave {
 public:
  AsyncSave();                                 // no save
  AsyncSave(AsyncSave&&) noexcept;             // `other` then has no save
  AsyncSave& operator=(AsyncSave&&) noexcept;  // waits for the save that this object had
  ~AsyncSave();

  explicit operator bool() const;  // whether it has a save, complete or not
  bool done() const;               // the save has ended on this rank; true without a save
  bool complete() const;           // there is a save, and its checkpoint is complete
  // The folder of the checkpoint. Throws UsageError without a save.
  const std::string& path() const;
  // Returns when the tensors are copied and may change; at once without SaveOptions::async_staging. Throws nothing: an
  // error of the copy is thrown by wait().
  void wait_staging();
  // Returns when the checkpoint is complete. Throws what save() throws, the same error on all ranks, once.
  void wait();

 private:
  struct State;
  std::unique_ptr<State> state_;
  friend AsyncSave async_save(const StateDict&, const std::string&, const Values&, const SaveOptions&, AsyncSave,
                              const World&);
};

// As save(), but returns when the tensors are copied (staged), and writes the copies on a thread while training goes on
// (torch.distributed.checkpoint.async_save). Each rank copies only what it writes. Errors of the plan, such as a wrong
// path, are thrown at once on all ranks; errors of the disk by wait(). The checkpoint is complete, and has its name,
// when wait() has returned; a crash before that leaves older checkpoints intact.
//
// All ranks must call it. It waits for `previous` first and copies into its memory, so pass the last one in a loop. One
// save at a time writes into a folder of checkpoints: UsageError if another one does. Call wait() before destroy().
// `options.on_stage` is called on the thread after "planned".
//
// Example:  dcp::AsyncSave saving;
//           for (int64_t step = 1; step <= steps; step++) {
//             train_step();
//             if (step % 100 == 0)
//               saving = dcp::async_save(dict, dcp::step_folder("out", step), {}, {}, std::move(saving));
//           }
//           saving.wait();
// With {.async_staging = true}, call saving.wait_staging() before optimizer.step(): forward and backward of the next
// step run while the tensors are copied.
AsyncSave async_save(const StateDict& dict, const std::string& path, const Values& values = {},
                     const SaveOptions& options = {}, AsyncSave previous = {}, const World& world = World::current());

}  // namespace tessera::dcp
