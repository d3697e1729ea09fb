#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

#include <ATen/core/Tensor.h>

// Dropout on plain tensors of a parallelized model. A style returns local tensors as plain tensors (use_local_output).
// LibTorch's kernels would draw from each rank's own generator: a replicated tensor would get another mask on every
// rank, and the shards of a tensor could get equal masks. The kernels here find the placement of the plain tensor and
// draw by global index, as torch::nn::Dropout on a DTensor does:
//
//   in a PlainDropoutScope                       replicated over the mesh of the scope
//   computed from the to_local() of a DTensor    that placement, where the sizes allow it; else an error
//   inside of a parallelized model               replicated
//   outside of all Tessera modules               an error if styles of a parallelized model ran there too
//   otherwise                                    LibTorch's kernel
//
// A tensor without autograd history (no_grad, frozen parameters, the argument of a checkpoint that is recomputed) can
// be a shard although no to_local() is found. Then the ranks compare its values: replicated if they are equal, else an
// error. A compiled step cannot compare: a shard without history in it makes such a dropout an error.
//
// They serve torch::dropout and its variants, and the dropout of torch::scaled_dot_product_attention.
namespace tessera {

// Installs the kernels for all following calls in this process. parallelize_module calls it.
void install_plain_dropout();

// While alive, dropout on a plain tensor of this thread draws as on a tensor that is replicated over the mesh.
class PlainDropoutScope {
 public:
  explicit PlainDropoutScope(const DeviceMesh& mesh);
  ~PlainDropoutScope();
  PlainDropoutScope(const PlainDropoutScope&) = delete;

 private:
  const DeviceMesh* before_;
  DeviceMesh mesh_;
};

// A style calls this when it runs. Throws UsageError if it runs outside of the parallelized module, where a dropout has
// been drawn by LibTorch's kernel: the dropout may belong to the same model.
void note_style_runs(const DeviceMesh& mesh);
// A style calls this for each local tensor that it passes on. After a shard without autograd history, dropout on this
// thread compares the values of tensors whose placement is not known.
void note_local_tensor(const at::Tensor& local, const Placement& placement);

// The DTensor of which the plain tensor `t`, the input of a dropout, is the local tensor. An undefined tensor if `t` is
// not part of a parallelized model. Throws UsageError if `t` is computed from a shard and its own placement is unknown.
// `op` names the dropout in errors. `mesh`: of a dropout that is known to be a part of such a model. Differentiable.
at::Tensor distributed_dropout_input(const at::Tensor& t, const char* op, const DeviceMesh& mesh = {});

}  // namespace tessera
