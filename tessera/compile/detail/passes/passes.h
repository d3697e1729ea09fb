#pragma once
#include "tessera/compile/detail/passes/pass.h"

// The passes. Each one is in the file with its name, which starts with what it does, the law it uses and an example.
namespace tessera::compiler {

Matched functionalise(Program& program);
Matched fold_views(Program& program);
Matched fold_casts(Program& program);
Matched constant_folding(Program& program, const PassSettings& settings);
Matched common_subexpressions(Program& program);
Matched dead_code(Program& program);
Matched batch_dims(Program& program, const PassSettings& settings);
Matched cancel_collectives(Program& program);
Matched place_redistributes(Program& program);
Matched merge_collectives(Program& program, const PassSettings& settings);
Matched hoist_communication(Program& program);
Matched fuse_ddp_with_concat_op(Program& program);
Matched fuse_ddp_with_coalesced_op(Program& program);
Matched bucket_all_gathers(Program& program);
Matched prefetch_all_gathers(Program& program);
Matched bucket_reduce_scatters(Program& program);
Matched schedule_comm_wait(Program& program);
Matched overlap_communication(Program& program, const PassSettings& settings);
Matched cublas_epilogues(Program& program);
Matched cuda_kernels(Program& program);
Matched cpu_kernels(Program& program);
Matched fuse_bias(Program& program);  // on CUDA
Matched fuse_cpu_bias(Program& program);
Matched in_place_collectives(Program& program);
Matched in_place_ops(Program& program, const PassSettings& settings);
Matched recompute(Program& program);
Matched recompute_products(Program& program, const PassSettings& settings);
Matched fast_products(Program& program);
Matched widen_bfloat16(Program& program);
void compute_in_float32(Program& program);  // the same, and products do not round either: to judge the error of others
Matched fuse_small_ops(Program& program);
Matched fuse_pointwise(Program& program);

}  // namespace tessera::compiler
