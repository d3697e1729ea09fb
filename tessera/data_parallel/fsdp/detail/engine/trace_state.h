#pragma once
#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"

#include <memory>

namespace tessera::data_parallel::fsdp {

// Call before a group is used or its settings change. On first use inside a traced step, snapshots the group's state:
// adds a guard and restores the state after tracing. Every replay then applies what the step leaves behind: gradients
// that wait for a later reduction, and changed settings. Outside tracing it does nothing.
//
// Throws UsageError if less than a step is compiled, or if the group is unsharded already.
void snapshot_in_traced_step(const std::shared_ptr<ScheduledGroup>& scheduled);

// The same for a tensor that `owner` keeps between steps.
void snapshot_in_traced_step(std::shared_ptr<void> owner, at::Tensor& tensor);

}  // namespace tessera::data_parallel::fsdp
