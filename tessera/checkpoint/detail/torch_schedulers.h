#pragma once
#include "tessera/state/state_dict.h"

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

// The counters of LibTorch's schedulers, which have no state dict. The learning rate is part of the optimizer's state.
namespace tessera::dcp {

StateDict scheduler_state(torch::optim::LRScheduler& scheduler);
StateDict scheduler_state(torch::optim::ReduceLROnPlateauScheduler& scheduler);
// Throws UsageError if a counter is missing.
void set_scheduler_state(torch::optim::LRScheduler& scheduler, const StateDict& dict);
void set_scheduler_state(torch::optim::ReduceLROnPlateauScheduler& scheduler, const StateDict& dict);

}  // namespace tessera::dcp
