#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/holder.h"

#include <torch/nn/modules/batchnorm.h>

#include <type_traits>
#include <utility>

// Batch norm over the global batch: all samples of all ranks of a group (PyTorch: SyncBatchNorm). In training mode each
// rank normalizes its local batch with the mean and variance of the global batch, and running statistics are those of
// the global batch. Local batches may have different sizes or be empty. Values and gradients are those of plain batch
// norm on the global batch:
//
//   forward    one all-gather of [mean, M2, count], one value per channel, combined as in Chan et al.
//   backward   one all-reduce of [sum dy, sum dy xhat], if the input needs a gradient
//
// Gradients of weight and bias are this rank's part, as for every parameter; data parallelism reduces them. Each call
// is a collective: all ranks of the group call it, and ranks with an empty batch also run backward. In eval mode, and
// in a group of one rank, it is plain batch norm without communication.
namespace tessera {

// Makes every BatchNorm1d, 2d and 3d at or below `module` synchronize, in place. Parameters, buffers and names do not
// change. `group`: all ranks if not given. A second call with the same group changes nothing. Clones synchronize too.
// Throws UsageError, and changes nothing, if a batch norm cannot have hooks (nn/hooks.h) or uses another group already.
// Example:  convert_sync_batchnorm(*model);
//           convert_sync_batchnorm(*model, mesh["dp"]);
void convert_sync_batchnorm(Module& module, comm::Group group = {});
void convert_sync_batchnorm(Module& module, const DeviceMesh& mesh);  // a mesh with one axis
// The same for a holder, which it returns, as in PyTorch.
// Example:  DistributedDataParallel ddp(convert_sync_batchnorm(Net()));
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H convert_sync_batchnorm(H holder,
                                                                                             comm::Group group = {}) {
  convert_sync_batchnorm(static_cast<Module&>(*holder), std::move(group));
  return holder;
}

namespace nn {

// The same as a separate module, for inputs with at least two dims.
// Example:  nn::SyncBatchNorm norm(torch::nn::BatchNormOptions(64).eps(1e-3), mesh.get_group("dp"));
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<2, SyncBatchNormImpl> {
 public:
  // `group`: all ranks if not given.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, comm::Group group = {});
  // x: (N, C, ...).
  at::Tensor forward(const at::Tensor& x);
  // Prints the number of features, eps and the group.
  void pretty_print(std::ostream& out) const override;

 private:
  void _check_input_dim(const at::Tensor& x) override;
  comm::Group group_;
};
// The holder of SyncBatchNormImpl.
TESSERA_MODULE(SyncBatchNorm);

}  // namespace nn
}  // namespace tessera
