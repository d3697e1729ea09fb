#include "benchmarks/gpt2_step.h"

#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/parallelize_module.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/randint.h>

#include <memory>

namespace tessera::bench {
namespace gpt2_step_details {

struct Batch {
  at::Tensor x, y;
  friend void tessera_visit(Batch& b, auto&& field) { field(b.x), field(b.y); }
};

namespace {

class Bfloat16Autocast {
 public:
  explicit Bfloat16Autocast(at::DeviceType device) : device_(device) {
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, at::kBFloat16);
  }
  ~Bfloat16Autocast() {
    at::autocast::set_autocast_enabled(device_, false);
    at::autocast::clear_cache();
  }
  Bfloat16Autocast(const Bfloat16Autocast&) = delete;

 private:
  at::DeviceType device_;
};

const auto forward_backward = [](auto& model, const Batch& batch) {
  model->zero_grad();
  at::Tensor loss;
  {
    const Bfloat16Autocast on(batch.x.device().type());
    loss = models::loss(model(batch.x), batch.y);
  }
  loss.backward();
  return loss.detach();
};

// The step of a model, with an optimizer of its own.
template <class H>
Step step_of(H model, bool compiled, const Batch& batch) {
  auto optimizer = std::make_shared<optim::AdamW>(model->parameters(), optim::AdamW::Options{.fused = true});
  const auto finish = [optimizer] {
    optim::clip_grad_norm_(optimizer->parameters(), 1.0);
    optimizer->step();
  };
  if (!compiled)
    return [=]() mutable {
      forward_backward(model, batch);
      finish();
    };
  auto step = compile(forward_backward, {.captures = Captures::None});
  return [=]() mutable {
    step(model, batch);
    finish();
  };
}

}  // namespace
}  // namespace gpt2_step_details

Step gpt2_step(const Gpt2Case& of, const std::string& how, bool compiled, const DeviceMesh& mesh) {
  using namespace gpt2_step_details;
  const auto tokens =
      at::randint(of.config.vocab_size, {of.batch, of.length + 1}, at::device(of.device).dtype(at::kLong));
  const Batch batch{tokens.narrow(1, 0, of.length).contiguous(), tokens.narrow(1, 1, of.length).contiguous()};
  models::GPT2 model(of.config);
  model->to(of.device);
  if (how == "ddp")
    return step_of(DistributedDataParallel<models::GPT2>(model, {.device_mesh = mesh, .gradient_as_bucket_view = true}),
                   compiled, batch);
  if (how == "fsdp") {
    for (auto& block : model->h) fully_shard(block, {.mesh = mesh});
    fully_shard(model, {.mesh = mesh});
  }
  if (how == "tp") parallelize_module(model, mesh, models::tensor_parallel_plan(of.config));
  return step_of(model, compiled, batch);
}

}  // namespace tessera::bench
