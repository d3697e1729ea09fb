#pragma once
#include "tessera/tensor_parallel/plan.h"

#include <string>

namespace tessera::train {

// Reads a tensor-parallel plan in the format of `tessera plan --print-plan`. Throws UsageError.
Plan read_plan_file(const std::string& file);

}  // namespace tessera::train
