#pragma once
#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"

#include <memory>

namespace tessera::data_parallel::fsdp {

// Before a turn is used, or told anything: in a step that is being compiled, the first time, notes how it is. The
// program is for units that are like that; when the step has been traced they are again; and what the step has left of
// them (gradients that wait for a later reduction, settings it has changed) is so after every run of the program.
//
// Throws UsageError where that cannot be: where less than a step is compiled, or the unit is whole already.
void note_in_compiled_step(const std::shared_ptr<Turn>& turn);

// The same of a tensor that somebody keeps between steps.
void carry_in_compiled_step(std::shared_ptr<void> owner, at::Tensor& kept);

}  // namespace tessera::data_parallel::fsdp
