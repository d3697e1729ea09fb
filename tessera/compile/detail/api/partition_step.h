#pragma once
#include "tessera/compile/api/data_parallel.h"
#include "tessera/compile/detail/trace/call_arguments.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <vector>

// How DataParallel changes the arguments of a step.
namespace tessera::compiler {

// UsageError unless the step has one module, at most one optimizer, and tensors with the batch dim.
void check_data_parallel_arguments(const DataParallel& mode, const CallArguments& arguments);

// Replaces parameters, gradients and optimizer state by DTensors, in place.
void partition_parameters(const DataParallel& mode, const CallArguments& arguments);

// While a step is traced: parameters are unsharded, and a hook averages and shards each gradient.
// Parameters are sharded again before the optimizer step.
class UnshardedParameters final : public TraceObserver {
 public:
  UnshardedParameters() = default;
  ~UnshardedParameters() override;
  UnshardedParameters(const UnshardedParameters&) = delete;
  void unshard(const DataParallel& mode, const CallArguments& arguments);
  void reshard();
  void before_optimizer_step() override { reshard(); }

 private:
  struct UnshardedParameter {
    at::Tensor parameter, sharded;
    unsigned hook;
  };
  std::vector<UnshardedParameter> unsharded_;
};

}  // namespace tessera::compiler
