#pragma once
#include "tessera/state/state_dict.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

struct LoadOptions {
  bool strict = true;   // anything that does not fit is an error; else it is reported, and the rest is loaded
  bool assign = false;  // take the tensor itself, with its dtype and device, instead of copying into the module's
};

// What did not fit.
struct LoadReport {
  struct Mismatch {
    std::string name;
    std::vector<int64_t> expected, found;  // global sizes
    bool operator==(const Mismatch&) const = default;
  };
  std::vector<std::string> missing;     // the module has it, the dict does not
  std::vector<std::string> unexpected;  // the other way round
  std::vector<Mismatch> mismatched;     // both have it, with other sizes

  bool empty() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
  bool operator==(const LoadReport&) const = default;
};
std::ostream& operator<<(std::ostream& out, const LoadReport& report);

// Copies the values of a dict into the parameters and buffers of a module, by name. All names and shapes are checked
// first: where this throws UsageError, nothing was changed. dtypes and devices are converted as copy_ does.
//
//   value        parameter      what happens
//   plain        plain          copied
//   plain        distributed    each rank takes its piece of the value; no communication. Requires: the same value on
//                               every rank
//   distributed  distributed    redistributed to the parameter's placements; over full_tensor() from another mesh
//   distributed  plain          full_tensor()
//   any          meta           the parameter gets memory, on the value's device and in its own dtype: a module that
//                               was built without memory need not be filled first
//
// Placements are always the parameter's, with `assign` too. Where values are distributed this communicates, in the
// module's order of names: all ranks call it.
// Example:  auto report = load_state_dict(*model, dict, {.strict = false});
LoadReport load_state_dict(torch::nn::Module& module, const StateDict& dict, LoadOptions options = {});

}  // namespace tessera
