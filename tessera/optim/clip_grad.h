#pragma once
#include "tessera/optim/detail/local_tensors.h"

namespace tessera::optim {

struct NormOptions {
  double norm_type = 2;  // above 0, or infinity
  // Throws UsageError if the norm is NaN or infinite, before any gradient is scaled. Reads the norm on the host;
  // without it nothing here does.
  bool error_if_nonfinite = false;
  bool foreach = true;  // false: one tensor after the other. The same bits.
};

// The norm of all tensors as if they were one vector, plain and without dims, the same on every rank. Tensors may be
// plain (each rank counts its own as the whole) or distributed over any meshes. One all-reduce for each set of mesh
// axes over which some are cut, however many there are:
//
//   W S(0) on tp=2,  b R on tp=2,  E [S(0), S(1)] on dp=2,tp=2      ->  tp for W;  dp and tp for E;  none for b
//
// Partial tensors are first summed, each by itself: the norm of a sum is not to be had from those of its terms.
// All values as PyTorch computes them; with distributed ones, rounded by set and then in total.
at::Tensor get_total_norm(const Tensors& tensors, const NormOptions& options = {});

// Scales all gradients in place so that their norm is at most max_norm; gives the norm as it was. Parameters without
// gradient are passed over. A gradient that is Partial is replaced by its sum, which the optimizer then need not take.
at::Tensor clip_grad_norm_(const Tensors& parameters, double max_norm, const NormOptions& options = {});

// Second half of the above, for a norm computed before. Requires: total_norm is a plain tensor of one element.
void clip_grads_with_norm_(const Tensors& parameters, double max_norm, const at::Tensor& total_norm,
                           bool foreach = true);

// Every element of every gradient to within [-clip_value, clip_value], in place. Partial gradients as above.
void clip_grad_value_(const Tensors& parameters, double clip_value, bool foreach = true);

}  // namespace tessera::optim
