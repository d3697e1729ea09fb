#include "tessera/base/error.h"
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/pipelining/schedule.h"

#include <ATen/core/grad_mode.h>

namespace tessera::pipelining {

void compile_stage(PipelineStage& stage) { compile_stage(stage, {}); }

void compile_stage(PipelineStage& stage, const CompileOptions& options) {
  TESSERA_CHECK(fsdp_modules(stage.module()).empty(), UsageError, "compile_stage: fully_shard() was applied to stage ",
                stage.stage_index(), ", which must run eagerly. Remove compile_stage(), or use average_gradients()");
  CompileOptions split = options;
  split.split_backward = true;
  // eval() has inputs of many sizes, such as a text that grows: it does not compile.
  stage.compiled_ = [eager = stage.module_, compiled = compile(stage.module_, split)](const at::Tensor& x) mutable {
    return at::GradMode::is_enabled() ? compiled(x) : eager(x);
  };
}

}  // namespace tessera::pipelining
