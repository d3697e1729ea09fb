#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/holder.h"

#include <torch/nn/modules/batchnorm.h>

// Batch norm whose batch is that of all ranks of a group. In training mode each rank normalises its part with the mean
// and variance of the whole, and keeps running statistics of the whole; ranks may have parts of different sizes, or
// none. Values and gradients are those of plain batch norm on the whole batch:
//
//   forward    one all_gather of [mean, M2, count], a number a channel, combined as Chan et al. do
//   backward   one all_reduce of [sum dy, sum dy xhat], if the input needs a gradient
//
// Gradients of weight and bias are this rank's share, as those of every parameter are: data parallelism sums them. Each
// call is a collective: all ranks of the group make it, and those with an empty part run backward too. Plain forward
// runs in eval mode and in a group of one.
namespace tessera {

// Makes every BatchNorm1d, 2d and 3d at or below `module` such a one, in place: parameters, buffers, names and handles
// stay what they are. The group: every rank of the current world, unless told. Done again with the same group it
// changes nothing. A copy of the module keeps it.
// Throws UsageError, with nothing changed, if one of them cannot have hooks (nn/hookable.h) or already uses another
// group.
// Example:  convert_sync_batchnorm(*model);
//           convert_sync_batchnorm(*model, mesh["dp"]);
void convert_sync_batchnorm(Module& module, comm::Group group = {});
void convert_sync_batchnorm(Module& module, const DeviceMesh& mesh);  // a mesh of one axis

namespace nn {

// The same as a module of its own, for inputs of two dims or more.
// Example:  nn::SyncBatchNorm norm(torch::nn::BatchNormOptions(64).eps(1e-3), mesh.get_group("dp"));
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<2, SyncBatchNormImpl> {
 public:
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, comm::Group group = {});
  at::Tensor forward(const at::Tensor& x);
  void pretty_print(std::ostream& out) const override;

 private:
  void _check_input_dim(const at::Tensor& x) override;
  comm::Group group_;
};
TESSERA_MODULE(SyncBatchNorm);

}  // namespace nn
}  // namespace tessera
