#pragma once
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/compile/detail/trace/arguments.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

#include <string>
#include <vector>

namespace tessera {

struct DataParallelOptions {
  int64_t input_batch_dim = 0;    // of every tensor among the arguments
  DeviceMesh mesh = {};           // one axis; none: all ranks
  int64_t shard_at_least = 4096;  // "default": smaller parameters are replicated
};

// A step written for one rank becomes one for all ranks of a mesh, each with its own part of the batch:
//
//   "replicate"     every rank has all parameters; gradients are averaged                 (DDP)
//   "fully_shard"   a rank has a piece of each, dim 0 cut; they are gathered for the step,
//                   and gradients are averaged into pieces                                (ZeRO)
//   "default"       parameters that are large and can be cut evenly are cut, others not
//
// Parameters and state of the optimizer become distributed tensors in place when the step is first compiled, by the
// values of the first rank. Within the step a rank sees whole parameters and its own batch: factories of the batch's
// size, and a loss that is returned, are its own, too. A gradient is the mean over the ranks from the moment it is
// there, so clipping sees the mean.
class DataParallel {
 public:
  explicit DataParallel(std::string style, DataParallelOptions options = {});  // UsageError for another style
  const std::string& style() const { return style_; }
  const DataParallelOptions& options() const { return options_; }
  DeviceMesh mesh() const;
  Placement placement(const at::Tensor& parameter) const;

 private:
  std::string style_;
  DataParallelOptions options_;
};

namespace compiler {

// UsageError unless there is one module, at most one optimizer, and tensors with the batch dim.
void check(const DataParallel& mode, const Arguments& arguments);
// In place: parameters, buffers, gradients, state of the optimizer.
void partition(const DataParallel& mode, const Arguments& arguments);

// While a step is traced: its parameters are whole, and their gradients become means.
class WholeParameters final : public CompilingListener {
 public:
  WholeParameters() = default;
  ~WholeParameters() override;
  WholeParameters(const WholeParameters&) = delete;
  void open(const DataParallel& mode, const Arguments& arguments);
  void close();
  void before_optimizer_step() override { close(); }

 private:
  struct Each {
    at::Tensor parameter, distributed;
    unsigned hook;
  };
  std::vector<Each> open_;
};

}  // namespace compiler
}  // namespace tessera
