#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// A folder of checkpoints, one a step:
//
//   out/step-500/          complete: it got this name when all of it was on the disk
//   out/step-1000/
//   out/step-1500.partial/ being written, or left behind by a crash; the next save removes it
namespace tessera::dcp {

std::string step_folder(const std::string& parent, int64_t step);  // "out/step-1000"
std::string partial_folder(const std::string& checkpoint);         // "out/step-1000.partial"
std::string parent_folder(const std::string& checkpoint);          // "out"

// Complete ones, by step, ascending. None if there is no such folder.
std::vector<std::pair<int64_t, std::string>> steps_in(const std::string& parent);
// That of the highest step, if there is one.
std::optional<std::string> latest(const std::string& parent);

// Removes all but the last `count` of those up to `newest`: what has a higher step is of another run, and stays.
// A crash in the middle leaves none that looks complete and is not. Requires: one rank calls it.
void keep_latest(const std::string& parent, int64_t count, int64_t newest = std::numeric_limits<int64_t>::max());
// 1000 of "out/step-1000"; none for another name.
std::optional<int64_t> step_of(const std::string& checkpoint);
// Removes what saves have left behind here that were cut off. Requires: nobody is saving here; one rank calls it.
void remove_partial(const std::string& parent);

}  // namespace tessera::dcp
