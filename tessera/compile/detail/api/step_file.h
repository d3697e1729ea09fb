#pragma once
#include <map>
#include <string>

// The file of a saved step (PyTorch: the package of AOTInductor). It contains generated kernels as built code, so it is
// read only if it ends with the HMAC of its bytes under the user's key (codegen/kernel_key.h).
//
//   tessera step 1 000000048201   format, and the bytes of the file
//   program 9043                  name and bytes of a section, then these bytes
//   ...
//   <64 digits>                   the HMAC
namespace tessera::compiler {

using StepSections = std::map<std::string, std::string>;

// Writes the file, and adds the section "made for": the versions and the processor that the kernels need. Replaces an
// existing file by rename. UsageError if it cannot be written.
void write_step_file(const std::string& path, StepSections sections);

// UsageError if the file is missing, truncated, altered, written with another key, or made for another version of
// Tessera or LibTorch or for another processor.
StepSections read_step_file(const std::string& path);

// The section of that name. InternalError if it does not exist.
const std::string& section(const StepSections& sections, const std::string& name);

}  // namespace tessera::compiler
