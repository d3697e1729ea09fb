#include "tessera/base/error.h"
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/pipelining/schedule.h"

namespace tessera::pipelining {

void compile_stage(PipelineStage& stage) { compile_stage(stage, {}); }

void compile_stage(PipelineStage& stage, const CompileOptions& options) {
  TESSERA_CHECK(fsdp_modules(stage.module()).empty(), UsageError, "compile_stage: fully_shard() was applied to stage ",
                stage.stage_index(), ", which must run eagerly. Remove compile_stage(), or use average_gradients()");
  CompileOptions split = options;
  split.split_backward = true;
  stage.compiled_ = [compiled = compile(stage.module_, split)](const at::Tensor& x) mutable { return compiled(x); };
}

}  // namespace tessera::pipelining
