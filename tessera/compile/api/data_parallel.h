#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

#include <string>

namespace tessera {

// Options of DataParallel.
struct DataParallelOptions {
  int64_t input_batch_dim = 0;    // the batch dim of every tensor argument of the step
  DeviceMesh mesh = {};           // a mesh of one axis; not given: all ranks
  int64_t shard_at_least = 4096;  // style "default": parameters with fewer elements are replicated
};

// Compiles a step written for one rank into a data-parallel step (CompileOptions::parallel_mode). Each rank of the mesh
// passes its own part of the batch.
//
//   style           parameters                                      gradients                              like
//   "replicate"     replicated                                      averaged by all-reduce                 DDP
//   "fully_shard"   Shard(0), all-gathered for the step             averaged by reduce-scatter             FSDP, ZeRO-3
//   "default"       large, evenly divisible ones as "fully_shard", the others as "replicate"
//
// The first compilation turns parameters, gradients and optimizer state into DTensors in place, with the values of the
// first rank. Inside the step a rank sees unsharded parameters and its own batch; a returned loss is that rank's loss.
// A gradient is averaged as soon as backward has computed it, so gradient clipping works on the average.
//
//   auto step = compile(train_step, {.parallel_mode = DataParallel("fully_shard", {.mesh = mesh["dp"]})});
//   for (...) step(model, opt, batch_of_this_rank);
class DataParallel {
 public:
  // UsageError if the style is unknown or the mesh has more than one axis.
  explicit DataParallel(std::string style, DataParallelOptions options = {});
  // "replicate", "fully_shard" or "default".
  const std::string& style() const { return style_; }
  // As passed to the constructor.
  const DataParallelOptions& options() const { return options_; }
  // The mesh of the options, or a mesh of all ranks with one axis "dp".
  DeviceMesh mesh() const;
  // The placement that this style gives to a parameter.
  Placement placement(const at::Tensor& parameter) const;

 private:
  std::string style_;
  DataParallelOptions options_;
};

}  // namespace tessera
