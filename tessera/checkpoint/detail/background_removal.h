#pragma once
#include <cstdint>
#include <string>
#include <vector>

// A checkpoint that was replaced, or is one too many, is renamed to .partial, so that it does not look complete, and
// removed on a thread: to free its blocks and its pages in memory takes the kernel a quarter of a second per GB, and
// nothing waits for it but the next save. What a crash leaves is removed by the next save, like other .partial folders.
//
// One such folder is not removed, but left to the next save, which overwrites its files: a file system writes blocks
// and pages that a file has already in half the time of new ones, and frees nothing.
namespace tessera::dcp {

// Waits for earlier removals. An error is not reported here: the next save tries again and reports it.
void remove_in_background(std::vector<std::string> folders);
// Returns when all folders given to remove_in_background are gone. A process that exits waits, too.
void wait_for_removals();

// Leaves a .partial folder to the next save. The exit of the process removes it, if it is still there.
void leave_to_next_save(const std::string& folder);
void remove_left_folders();  // now

// The step-N.partial folders in `parent`.
std::vector<std::string> partial_folders(const std::string& parent);

// Renames all checkpoints that keep_latest() removes; returns the new paths.
std::vector<std::string> retire_checkpoints(const std::string& parent, int64_t count, int64_t newest);

// The calling thread yields to the others, which train.
void lower_priority_of_this_thread();

}  // namespace tessera::dcp
