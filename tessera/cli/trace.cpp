#include "tessera/cli/trace.h"

#include "tessera/base/error.h"
#include "tessera/compile/api/compile.h"
#include "tessera/compile/detail/report/trace_page.h"
#include "tessera/data_parallel/detail/reducer_mode.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/mlp.h"
#include "tessera/models/sizes.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/ranks.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <sstream>

namespace tessera::cli {
namespace {

using testing::Rank;

struct TraceBatch {
  at::Tensor x, y;
  friend void tessera_visit(TraceBatch& b, auto&& field) { field(b.x), field(b.y); }
};

// The values do not affect the compiled program.
TraceBatch batch_of(const models::MLPConfig& config, const TraceRequest& request) {
  return {at::zeros({request.batch, config.layers.front().in}), {}};
}
template <class Config>
TraceBatch batch_of(const Config&, const TraceRequest& request) {
  const auto tokens = at::zeros({request.batch, request.sequence}, at::kLong);
  return {tokens, tokens.clone()};
}

const auto train_step = [](auto& model, auto& opt, const TraceBatch& batch) {
  opt.zero_grad();
  auto out = model(batch.x);
  auto loss = batch.y.defined() ? models::loss(out, batch.y) : out.pow(2).mean();
  loss.backward();
  opt.step();
  return loss;
};

template <class Model>
void compile_step(Model& model, const TraceRequest& request, const TraceBatch& batch, const CompileOptions& options) {
  optim::AdamW opt(model->parameters(), {.fused = true});
  train_step(model, opt, batch);  // creates the optimizer state, as in every step but the first
  auto compile_options = options;
  if (request.passes) compile_options.passes = PassList(request.passes->begin(), request.passes->end());
  auto step = compile(train_step, compile_options);
  step(model, opt, batch);
}

Plan plan_of(const models::MLPConfig&) { return {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}}; }
template <class Config>
Plan plan_of(const Config& config) {
  return models::tensor_parallel_plan(config);
}

// Compiles the step of one rank in the requested parallel mode.
template <class Holder, class Config>
void run_rank(Rank& me, const TraceRequest& request, const Config& config, Holder model,
              const compiler::TraceSink& sink) {
  const auto batch = batch_of(config, request);
  CompileOptions options{.trace = me.rank == 0 ? sink : compiler::TraceSink()};
  if (request.parallel == "ddp") {
    const ReducerModeScope mode(ReducerMode::PerParameterAlways);  // so that passes can merge them
    DistributedDataParallel ddp(model);
    return compile_step(ddp, request, batch, options);
  }
  if (request.parallel == "fsdp")
    fully_shard(model, {.mesh = me.mesh({me.size()}, {"dp"})});
  else if (request.parallel == "tp")
    parallelize_module(model, me.mesh({me.size()}, {"tp"}), plan_of(config));
  else if (request.parallel != "none")
    options.parallel_mode = DataParallel(request.parallel, {.mesh = me.mesh({me.size()}, {"dp"})});
  compile_step(model, request, batch, options);
}

template <class Holder, class Config>
std::string page_for(const TraceRequest& request, const Config& config) {
  const Holder initial(config);
  std::string page;
  const auto sink = [&](const compiler::CompileTrace& trace) {
    std::ostringstream out;
    compiler::trace_page(out, trace, c10::str("tessera trace: ", request.model, ", ", request.parallel));
    page = out.str();
  };
  testing::run_ranks(request.parallel == "none" ? 1 : request.ranks,
                     [&](Rank& me) { run_rank(me, request, config, clone(initial), sink); });
  return page;
}

std::string page_for(const TraceRequest& request, const models::GPT2Config& config) {
  return page_for<models::GPT2>(request, config);
}
std::string page_for(const TraceRequest& request, const models::LlamaConfig& config) {
  return page_for<models::Llama>(request, config);
}

void check(const TraceRequest& request) {
  std::vector<std::string> names;
  for (const auto& mode : parallel_modes()) names.emplace_back(mode.name);
  TESSERA_CHECK(std::find(names.begin(), names.end(), request.parallel) != names.end(), UsageError,
                "unknown parallel mode '", request.parallel, "'; allowed: ", c10::Join(", ", names));
  TESSERA_CHECK(request.ranks >= 1, UsageError, "cannot trace on ", request.ranks, " ranks; use at least 1");
  TESSERA_CHECK(request.batch >= 1 && request.sequence >= 1, UsageError, "the batch ", request.batch, " x ",
                request.sequence, " is empty");
  if (request.passes)
    for (const auto& pass : *request.passes) compiler::find_pass(pass);
}

}  // namespace

const std::vector<ParallelMode>& parallel_modes() {
  static const std::vector<ParallelMode> modes = {
      {"none", "one rank"},
      {"ddp", "DistributedDataParallel with one all-reduce per parameter, which passes merge"},
      {"fsdp", "fully_shard() on the root module"},
      {"replicate", "a plain model under DataParallel(\"replicate\")"},
      {"fully_shard", "a plain model under DataParallel(\"fully_shard\")"},
      {"default", "a plain model under DataParallel(\"default\")"},
      {"tp", "tensor parallelism with the model's plan"},
  };
  return modes;
}

std::string make_trace_page(const TraceRequest& request) {
  check(request);
  if (request.model == "mlp") return page_for<models::MLP>(request, models::mlp_module());
  return std::visit([&](const auto& config) { return page_for(request, config); }, models::find_config(request.model));
}

}  // namespace tessera::cli
