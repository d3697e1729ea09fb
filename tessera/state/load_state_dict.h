#pragma once
#include "tessera/state/state_dict.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

// Options of load_state_dict, with PyTorch's names.
struct LoadOptions {
  bool strict = true;   // throw if a name is missing, unexpected or has other sizes; false: load the rest and report
  bool assign = false;  // use the tensor of the dict, with its dtype and device, instead of copying its values
};

// The names that were not loaded (PyTorch: _IncompatibleKeys).
struct LoadReport {
  // A name with different sizes in the module and in the dict.
  struct Mismatch {
    std::string name;
    std::vector<int64_t> expected, found;  // global sizes: of the module, of the dict
    bool operator==(const Mismatch&) const = default;
  };
  std::vector<std::string> missing;     // missing_keys: in the module, not in the dict
  std::vector<std::string> unexpected;  // unexpected_keys: in the dict, not in the module
  std::vector<Mismatch> mismatched;     // in both, with different sizes

  // Whether everything was loaded.
  bool empty() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
  bool operator==(const LoadReport&) const = default;
};
// Prints one line per name, such as "missing layers.0.weight".
std::ostream& operator<<(std::ostream& out, const LoadReport& report);

// Copies the values of a dict to the parameters and buffers of a module, by name. Checks all names and sizes first: if
// it throws UsageError, nothing has changed. Converts dtypes and devices as copy_ does.
//
//   value        parameter      action
//   plain        plain          copies
//   plain        distributed    each rank copies its local shard of the value; no communication. Requires: the same
//                               value on every rank
//   distributed  distributed    redistributes to the placements of the parameter; from another mesh: full_tensor()
//                               first
//   distributed  plain          full_tensor()
//   any          meta           allocates the parameter on the device of the value, in the dtype of the parameter. So a
//                               module on the meta device needs no initialization
//
// The placements of the parameters never change, not even with `assign`. If values are distributed, this communicates
// in the order of names of the module, so all ranks must call it.
// Example:  auto report = load_state_dict(*model, dict, {.strict = false});
LoadReport load_state_dict(torch::nn::Module& module, const StateDict& dict, LoadOptions options = {});

}  // namespace tessera
