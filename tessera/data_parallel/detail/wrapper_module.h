#pragma once

namespace tessera::data_parallel {

// Base of modules that wrap another one, their child `module`: DistributedDataParallel and FullyShardedDataParallel.
// get_model_state_dict() leaves "module." out of names, as PyTorch does.
struct WrapperModule {
  virtual ~WrapperModule() = default;
  virtual bool averages_in_backward() const { return false; }  // averages_in_backward.h
};

}  // namespace tessera::data_parallel
