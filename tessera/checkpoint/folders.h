#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// A folder of checkpoints, one per step:
//
//   out/step-500/          complete: save() renames it to this when all data is on disk
//   out/step-1000/
//   out/step-1500.partial/ incomplete, left by a crash, or an old one; the next save overwrites or removes it
namespace tessera::dcp {

// The paths "out/step-1000", "out/step-1000.partial" and "out".
std::string step_folder(const std::string& parent, int64_t step);
std::string partial_folder(const std::string& checkpoint);
std::string parent_folder(const std::string& checkpoint);

// Steps and paths of all complete checkpoints, in ascending order. Empty if the folder does not exist.
std::vector<std::pair<int64_t, std::string>> steps_in(const std::string& parent);
// The complete checkpoint with the highest step, if any.
std::optional<std::string> latest(const std::string& parent);

// Removes all but the last `count` checkpoints up to step `newest`. Higher steps belong to another run and stay. A
// crash during removal does not leave a checkpoint that looks complete. Requires: only one rank calls it.
void keep_latest(const std::string& parent, int64_t count, int64_t newest = std::numeric_limits<int64_t>::max());
// 1000 for "out/step-1000"; none for other names.
std::optional<int64_t> step_of(const std::string& checkpoint);
// Removes what interrupted saves left. Requires: no save is running in this folder; only one rank calls it.
void remove_partial(const std::string& parent);

}  // namespace tessera::dcp
