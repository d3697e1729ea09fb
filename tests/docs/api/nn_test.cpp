// The examples of the API reference: nn, state, optim, tensor_parallel.
#include "docs/fixtures.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

#include <iostream>

namespace tessera::docs_nn {
namespace {

namespace ts = tessera;
using ts::testing::Rank;
using ts::testing::run_ranks;

// example: tessera/nn/holder.h
struct BlockImpl : torch::nn::Module {
  ts::nn::Linear up = register_module("up", ts::nn::Linear(4, 8)), down = register_module("down", ts::nn::Linear(8, 4));
  at::Tensor forward(const at::Tensor& x) { return down(torch::relu(up(x))); }
};
TESSERA_MODULE(Block);  // Block is a ts::Holder<BlockImpl>, and *block is a ts::Hooked<BlockImpl>

TESSERA_MODULE_IMPL(Layer, BlockImpl);  // the same with another name
// end

struct ModelImpl : torch::nn::Module {
  ts::nn::ModuleList<Block> blocks = register_module("blocks", ts::nn::ModuleList<Block>());
  ModelImpl() {
    for (int i = 0; i < 2; i++) blocks->push_back(Block());
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : *blocks) x = block(x);
    return x;
  }
};
TESSERA_MODULE(Model);

TEST(ApiNn, Holder) {
  // example: tessera/nn/holder.h
  Block block;
  ts::Hooked<BlockImpl>& module = *block;  // the module with its hooks
  const ts::Holder<BlockImpl>& base = block;
  auto hook =
      block.register_forward_hook([](ts::Module&, const ts::Tensors&, const ts::Tensors& out) { return out[0] * 2; });
  at::Tensor y = block(torch::ones({1, 4}));
  hook.remove();
  // end
  EXPECT_EQ(module.parameters().size(), 4);
  EXPECT_EQ(y.size(1), 4);
}

struct ScopedTimer {
  explicit ScopedTimer(const char*) {}
};

TEST(ApiNn, Hooks) {
  nn::Linear up(4, 4);
  Block block;
  // example: tessera/nn/hooks.h
  register_forward_pre_hook(*up, [](Module&, const Tensors& in) { return in[0] * 2; });
  register_around_hook(*block, [](Module&, const Tensors& in, const ForwardCall& forward) {
    ScopedTimer timer("block");
    return forward(in);
  });

  const ts::ForwardPreHook before = [](ts::Module&, const ts::Tensors& inputs) -> ts::Replacement {
    return std::nullopt;
  };
  const ts::ForwardHook after = [](ts::Module&, const ts::Tensors& inputs,
                                   const ts::Tensors& outputs) -> ts::Replacement {
    return ts::Tensors{outputs[0] + 1};
  };
  const ts::BackwardPreHook before_backward = [](ts::Module&, const ts::Tensors& grad_outputs) {
    return ts::Replacement();
  };
  const ts::BackwardHook after_backward = [](ts::Module&, const ts::Tensors& grad_inputs, const ts::Tensors&) {
    return ts::Replacement();  // unchanged
  };
  const ts::AroundHook twice = [](ts::Module&, const ts::Tensors& inputs, const ts::ForwardCall& forward) {
    return forward(forward(inputs));
  };
  ts::register_forward_pre_hook(*up, before, ts::HookOptions{.prepend = true});
  ts::HookHandle handle = ts::register_forward_hook(*up, after);
  ts::register_full_backward_pre_hook(*up, before_backward);
  ts::register_full_backward_hook(*up, after_backward);
  ts::register_around_hook(*up, twice);
  up(torch::ones({1, 4}, torch::requires_grad())).sum().backward();
  handle.remove();

  torch::nn::Linear without(4, 4);
  EXPECT_FALSE(ts::has_hook_point(*without));  // no holder of Tessera made it
  ts::HookPoint& point = ts::hook_point(*up);
  EXPECT_NE(point.hooks(), nullptr);
  // end
}

TEST(ApiNn, ModuleTree) {
  struct AttnImpl : torch::nn::Module {
    ts::nn::Linear wq = register_module("wq", ts::nn::Linear(2, 2));
    at::Tensor mask = register_buffer("mask", torch::ones({2}));
  };
  struct LayersImpl : torch::nn::Module {
    LayersImpl() {
      auto list = std::make_shared<torch::nn::ModuleListImpl>();
      auto layer = std::make_shared<torch::nn::Module>();
      layer->register_module("attn", std::make_shared<AttnImpl>());
      list->push_back(layer);
      register_module("layers", list);
    }
  };
  const auto model = std::make_shared<LayersImpl>();
  // example: tessera/nn/module_tree.h
  auto wq = get_submodule(*model, "layers.0.attn.wq");
  at::Tensor weight = ts::get_parameter(*model, "layers.0.attn.wq.weight");
  at::Tensor mask = ts::get_buffer(*model, "layers.0.attn.mask");
  EXPECT_EQ(ts::class_name(*wq), "Linear");
  // end
  EXPECT_EQ(weight.size(0), 2);
}

TEST(ApiNn, Modules) {
  // example: tessera/nn/modules.h
  nn::Sequential net(nn::Linear(3, 4), nn::ReLU());
  auto copy = net->clone();  // a torch::nn::SequentialImpl with the same names
  auto embedding = ts::nn::Embedding::from_pretrained(torch::ones({10, 4}));
  auto bag = ts::nn::EmbeddingBag::from_pretrained(torch::ones({10, 4}));
#define COUNT(Name) +1
  constexpr int modules = 0 TESSERA_FOR_EACH_TORCH_MODULE(COUNT);  // of torch::nn that have a holder here
  // end
#undef COUNT
  EXPECT_GT(modules, 50);
  EXPECT_EQ(copy->children().size(), 2);
  EXPECT_EQ(embedding(torch::zeros({2}, torch::kLong)).size(1), 4);
  EXPECT_EQ(bag(torch::zeros({1, 2}, torch::kLong)).size(1), 4);
}

struct QueriesImpl : torch::nn::Module {
  ts::nn::Linear wq = register_module("wq", ts::nn::Linear(4, 4)), wv = register_module("wv", ts::nn::Linear(4, 4));
  at::Tensor forward(const at::Tensor& x) { return wq(x) + wv(x); }
};
TESSERA_MODULE(Queries);

TEST(ApiNn, Lora) {
  Queries model;
  // example: tessera/nn/modules.h
  nn::lora::add(*model, {.rank = 8, .targets = {"wq", "wv"}});  // before fully_shard and the optimizer
  optim::AdamW optimizer(nn::lora::parameters(*model), {.lr = 1e-4});
  nn::lora::merge(*model);  // after the training: the adapters are part of W
  // end
  Queries another;
  // example: tessera/nn/modules.h
  const ts::nn::lora::Options options{.rank = 4, .alpha = 8};  // every Linear
  std::vector<std::string> names = ts::nn::lora::add(*another, options);
  // end
  EXPECT_EQ(names.size(), 2);
}

// example: tessera/nn/attention_heads.h
struct AttentionImpl : torch::nn::Cloneable<AttentionImpl>, AttentionHeads {
  void reset() override {}
  int64_t head_dim() const override { return 64; }  // tensor parallelism shards by heads
};
// end

TEST(ApiNn, AttentionHeads) {
  const AttentionImpl attention;
  EXPECT_EQ(static_cast<const AttentionHeads&>(attention).head_dim(), 64);
}

TEST(ApiNn, Checkpoint) {
  Block block;
  const auto x = torch::ones({2, 4}, torch::requires_grad());
  const auto attend = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask) { return q * k * mask; };
  const auto q = x, k = x, mask = torch::ones({2, 4});
  {
    // example: tessera/nn/checkpoint.h
    auto y = checkpoint(block, x);  // block(x): bitwise the same output and gradients
    // end
    y.sum().backward();
  }
  {
    // example: tessera/nn/checkpoint.h
    auto y = checkpoint({.keep = keep_ops({"aten::mm"})}, block, x);
    // end
    y.sum().backward();
  }
  // example: tessera/nn/checkpoint.h
  auto y = checkpoint([&](auto q, auto k) { return attend(q, k, mask); }, q, k);

  const ts::CheckpointOptions options{.preserve_rng_state = false};  // no random ops inside
  int recomputed = 0;
  auto z = ts::checkpoint(
      options,
      [&](const at::Tensor& a) {
        recomputed += ts::recomputing();
        return torch::sin(a).exp();
      },
      x);
  z.sum().backward();
  EXPECT_EQ(recomputed, 1);
  // end
  y.sum().backward();
}

TEST(ApiNn, CheckpointWrapper) {
  Model model;
  // example: tessera/nn/checkpoint_wrapper.h
  for (auto& block : *model->blocks) checkpoint_wrapper(block);
  // end
  model(torch::ones({1, 4})).sum().backward();
  // example: tessera/nn/checkpoint_wrapper.h
  for (auto& block : *model->blocks) ts::remove_checkpoint_wrapper(block);

  apply_activation_checkpointing(
      *model, [](const std::string&, const Module& m) { return dynamic_cast<const BlockImpl*>(&m) != nullptr; });
  // end
  model(torch::ones({1, 4})).sum().backward();
}

TEST(ApiNn, DeferredInit) {
  // example: tessera/nn/deferred_init.h
  auto model = ts::deferred_init([] { return ts::nn::Linear(4, 4); });  // no memory yet
  EXPECT_TRUE(ts::is_deferred(model->weight));
  ts::materialize(*model);
  EXPECT_FALSE(ts::is_deferred(model->weight));
  // end
}

TEST(ApiNn, DistributeModule) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    ts::nn::Linear model(4, 4);
    // example: tessera/nn/distribute_module.h
    distribute_module(*model, mesh, {.partition = [](const std::string&, Module& m, const DeviceMesh& mesh) {
      if (auto* fc = dynamic_cast<torch::nn::LinearImpl*>(&m)) distribute_in_place(fc->weight, mesh, {Shard(0)});
    }});
    // end
    EXPECT_TRUE(ts::is_dtensor(model->weight));
    ts::nn::Linear another(4, 4);
    // example: tessera/nn/distribute_module.h
    const ts::PartitionFn partition = [](const std::string& name, ts::Module& module, const ts::DeviceMesh& mesh) {};
    const ts::ModuleIOFn input = [](ts::Module&, const ts::Tensors& in, const ts::DeviceMesh& mesh) -> ts::Replacement {
      return ts::Tensors{ts::DTensor::from_local(in[0], mesh, {ts::Shard(0)})};
    };
    const ts::DistributeModuleFns functions{.partition = partition, .input = input};
    ts::distribute_module(*another, mesh, functions);
    // end
    EXPECT_TRUE(ts::is_dtensor(another(torch::ones({2, 4}))));
  });
}

TEST(ApiNn, GradHooks) {
  auto a = torch::ones({2}, torch::requires_grad()), b = torch::ones({2}, torch::requires_grad());
  int logged = 0;
  const auto log_norm = [&](const Tensors& grads) { logged += static_cast<int>(grads.size()); };
  {
    // example: tessera/nn/grad_hooks.h
    register_multi_grad_hook({a, b}, [&](const Tensors& grads) { log_norm(grads); });
    ts::register_multi_grad_hook(
        {a, b}, [](const ts::Tensors& first) {}, ts::MultiGradMode::Any);
    ts::GradHookHandle handle = ts::register_post_accumulate_grad_hook(a, [&](const at::Tensor& leaf) {
      EXPECT_TRUE(ts::will_accumulate(leaf));
      log_norm({leaf.grad()});
    });
    (a * b).sum().backward();
    handle.remove();
    // end
  }
  EXPECT_EQ(logged, 3);
}

TEST(ApiNn, SavedTensorHooks) {
  const auto x = torch::ones({4}, torch::requires_grad());
  {
    const auto buffer = torch::ones({4});
    const auto is_view_of = [](const at::Tensor& base, const at::Tensor& t) { return t.is_alias_of(base); };
    const auto view_info = [](const at::Tensor& t) { return t.sizes().vec(); };
    const auto all_gather_again = [](const std::vector<int64_t>& sizes) { return torch::ones(sizes); };
    // example: tessera/nn/saved_tensor_hooks.h
    SavedTensorHooks scope({Accepts::SomeTensors, [&](const at::Tensor& t) -> Unpack {
                              if (!is_view_of(buffer, t)) return {};
                              return [=] { return all_gather_again(view_info(t)); };
                            }});
    // end
    (x * buffer).sum().backward();
  }
  {
    // example: tessera/nn/saved_tensor_hooks.h
    const ts::Pack pack = [](const at::Tensor& t) -> ts::Unpack {
      if (t.numel() < 4) return {};  // declines: saved as usual
      return [half = t.to(torch::kHalf), dtype = t.scalar_type()] { return half.to(dtype); };
    };
    SavedTensorHooks scope({Accepts::SomeTensors, pack});
    // end
    torch::sin(x).sum().backward();
  }
  // example: tessera/nn/saved_tensor_hooks.h
  const ts::PackerRef keeps_versions = std::make_shared<const ts::Packer>(ts::Packer{
      ts::Accepts::AllTensors, [](const at::Tensor& t) -> ts::Unpack {
        return [saved = ts::VersionedTensor(t)] { return saved.get(); };  // UsageError if t was changed in-place
      }});
  const ts::SavedTensorHooks scope(keeps_versions);
  torch::exp(x).sum().backward();
  // end
  EXPECT_TRUE(x.grad().defined());
}

TEST(ApiNn, SaveOnCpu) {
  ts::nn::Linear model(4, 4);
  const auto x = torch::ones({2, 4});
  at::Tensor loss;
  const auto with_cuda = [&] {
    // example: tessera/nn/save_on_cpu.h
    {
      SaveOnCpu offload({.pin_memory = true});
      loss = model(x).sum();
    }
    loss.backward();
    // end
  };
  if (torch::cuda::is_available()) with_cuda();
  // example: tessera/nn/save_on_cpu.h
  const ts::SaveOnCpuOptions pageable{.pin_memory = false};
  {
    const ts::SaveOnCpu offload(pageable);
    loss = model(x).sum();
  }
  loss.backward();
  // end
  EXPECT_TRUE(model->weight.grad().defined());
}

TEST(ApiState, StateDict) {
  ts::nn::Linear model(4, 4);
  // example: tessera/state/state_dict.h
  StateDict dict = state_dict(*model);
  for (const auto& [name, tensor] : dict) std::cout << name << " " << tensor.sizes() << "\n";
  if (const at::Tensor* w = dict.find("layers.0.attn.wq.weight")) std::cout << *w;
  std::cout << dict;  // one line per tensor: name, dtype, sizes, placements
  // end
  // example: tessera/state/load_state_dict.h
  auto report = load_state_dict(*model, dict, {.strict = false});
  const ts::LoadOptions options{.strict = false, .assign = true};  // takes the tensors of the dict
  const ts::LoadReport missing = ts::load_state_dict(*model, {}, options);
  std::cout << missing;  // missing weight, missing bias
  // end
  EXPECT_TRUE(report.empty());
  EXPECT_EQ(missing.missing.size(), 2);
}

TEST(ApiState, OptimizerState) {
  ts::nn::Linear model(4, 4);
  // example: tessera/state/optimizer_state.h
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  model(torch::ones({1, 4})).sum().backward();
  optimizer.step();
  ts::StateDict dict = ts::optimizer_state_dict(optimizer, *model);  // state.weight.exp_avg, ...
  ts::LoadReport report = ts::load_optimizer_state_dict(optimizer, *model, dict);
  std::shared_ptr<ts::OptimizerAccess> access = ts::access_to(optimizer);
  EXPECT_EQ(access->kind(), "AdamW");
  // end
  EXPECT_TRUE(report.empty());
}

TEST(ApiOptim, Optimizers) {
  ts::nn::Linear model(4, 4);
  const std::vector<at::Tensor> matrices{model->weight}, vectors{model->bias};
  {
    // example: tessera/optim/adam.h
    optim::Adam opt(model->parameters(), {.lr = 1e-3});
    const ts::optim::AdamOptions options{.lr = 1e-3, .betas = {0.9, 0.95}};
    // end
    opt.step();
  }
  {
    // example: tessera/optim/adam.h
    optim::AdamW opt(model->parameters(), {.lr = 3e-4, .fused = true});
    // end
    opt.step();
  }
  {
    // example: tessera/optim/adam.h
    optim::AdamW opt({{matrices, {.weight_decay = 0.1}}, {vectors, {.weight_decay = 0}}});
    // end
    opt.step();
    // example: tessera/optim/optimizer.h
    const ts::optim::ParamGroup<ts::optim::AdamWOptions> group{.params = matrices, .options = {.lr = 1e-4}};
    ts::optim::AdamW one_group({group});
    ts::optim::Optimizer& optimizer = one_group;
    optimizer.set_lr(0, 1e-5);
    optimizer.zero_grad();
    // end
  }
  {
    // example: tessera/optim/adam.h
    optim::RMSprop opt(model->parameters(), {.lr = 1e-3, .momentum = 0.9});
    const ts::optim::RMSpropOptions centered{.lr = 1e-3, .centered = true};
    // end
    opt.step();
  }
  {
    // example: tessera/optim/adam.h
    optim::Adagrad opt(model->parameters(), {.lr = 0.1});
    const ts::optim::AdagradOptions options{.lr = 0.1, .lr_decay = 1e-3};
    ts::optim::AdamOf<ts::optim::AdamWOptions>* base = nullptr;  // the base class of Adam and AdamW
    // end
    opt.step();
  }
  {
    // example: tessera/optim/sgd.h
    optim::SGD opt(model->parameters(), {.lr = 0.1, .momentum = 0.9});
    const ts::optim::SGDOptions nesterov{.lr = 0.1, .momentum = 0.9, .nesterov = true};
    // end
    opt.step();
  }
}

TEST(ApiOptim, ClipGrad) {
  ts::nn::Linear model(4, 4);
  model(torch::ones({1, 4})).sum().backward();
  // example: tessera/optim/clip_grad.h
  const ts::Tensors parameters = model->parameters();
  ts::Tensors grads;
  for (const auto& p : parameters) grads.push_back(p.grad());
  at::Tensor norm =
      ts::optim::get_total_norm(grads, ts::optim::NormOptions{.norm_type = 2, .error_if_nonfinite = true});
  ts::optim::clip_grads_with_norm_(parameters, /*max_norm=*/1.0, norm);
  ts::optim::clip_grad_value_(parameters, 0.5);
  // end
  EXPECT_LE(model->weight.grad().abs().max().item<double>(), 0.5);
}

TEST(ApiOptim, GradScaler) {
  ts::nn::Linear model(4, 4);
  ts::optim::SGD opt(model->parameters(), {.lr = 0.1});
  const auto loss = model(torch::ones({1, 4})).sum();
  const auto parameters = model->parameters();
  using optim::clip_grad_norm_;
  // example: tessera/optim/grad_scaler.h
  ts::optim::GradScaler scaler(ts::optim::GradScalerOptions{.init_scale = 1024});
  scaler.scale(loss).backward();
  scaler.unscale_(opt);
  clip_grad_norm_(parameters, 1.0);  // only if something reads the gradients before the step
  scaler.step(opt);
  scaler.update();
  // end
  EXPECT_EQ(scaler.get_scale(), 1024);
}

TEST(ApiOptim, Schedulers) {
  ts::nn::Linear model(4, 4);
  ts::optim::SGD optimizer(model->parameters(), {.lr = 0.1});
  using docs::train_step;
  const auto next_batch = [] { return torch::ones({2, 4}); };
  // example: tessera/optim/schedulers.h
  using namespace ts::optim;
  auto warmup = std::make_shared<LinearLR>(optimizer, /*start_factor=*/0.1, /*end_factor=*/1.0, /*total_iters=*/2);
  auto cosine = std::make_shared<CosineAnnealingLR>(optimizer, /*t_max=*/8);
  SequentialLR schedule(optimizer, {warmup, cosine}, /*milestones=*/{2});
  for (int step = 0; step < 3; step++) {
    train_step(model, optimizer, next_batch());
    schedule.step();
  }
  ts::optim::LRScheduler& any = schedule;
  std::cout << "step " << any.last_epoch() << ", learning rate " << any.last_lr()[0] << "\n";
  // end
  ts::optim::SGD other(model->parameters(), {.lr = 0.1});
  // example: tessera/optim/schedulers.h

  ts::optim::StepLR halves(other, /*step_size=*/10, /*gamma=*/0.5);
  MultiStepLR drops(other, {30, 60}, /*gamma=*/0.1);
  ConstantLR smaller(other, /*factor=*/0.5, /*total_iters=*/10);
  ExponentialLR decays(other, /*gamma=*/0.99);
  LambdaLR with_warmup(other, cosine_with_warmup(/*warmup=*/10, /*total=*/100, /*floor=*/0.1));
  LambdaLR wsd(other, warmup_stable_decay(/*warmup=*/10, /*stable=*/70, /*decay=*/20));
  // end
  // example: tessera/optim/schedulers.h

  auto step = [&] { return train_step(model, optimizer, next_batch()).item<double>(); };
  auto found = optim::find_lr(*model, optimizer, step);
  optimizer.set_lr(0, found.suggestion);
  const ts::optim::FindLROptions options{.steps = 10};
  ts::optim::FindLRResult result = ts::optim::find_lr(*model, optimizer, step, options);
  // end
  EXPECT_FALSE(result.losses.empty());
}

TEST(ApiTensorParallel, Plans) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    Block model;
    {
      Block model;
      const Plan plan = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
      const auto tokens = torch::ones({2, 4});
      // example: tessera/tensor_parallel/parallelize_module.h
      check_parallel(model, mesh["tp"], plan, tokens);
      parallelize_module(model, mesh["tp"], plan);
      // end
    }
    // example: tessera/tensor_parallel/parallelize_module.h
    const ts::ParallelizeOptions options{.unmatched = ts::Unmatched::Warn, .src_data_rank = std::nullopt};
    ts::parallelize_module(model, mesh["tp"], {{"gate", ts::ColwiseParallel()}}, options);  // no module is named gate
    parallelize_module(model, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    // end
    EXPECT_TRUE(ts::is_dtensor(model->up->weight));
    // example: tessera/tensor_parallel/plan.h
    Plan plan = {{"layers.*.attn.w[qkv]", ColwiseParallel()}, {"layers.*.attn.wo", RowwiseParallel()}};
    Plan for_the_root_module = ColwiseParallel();
    const std::vector<ts::PlannedModule> matched =
        ts::resolve(plan, {"", "layers.0.attn.wq", "layers.0.attn.wo"}, ts::Unmatched::Throw);
    // end
    EXPECT_EQ(matched.size(), 2);
  });
}

TEST(ApiTensorParallel, LossParallel) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const at::Tensor logits = ts::randn({4, 6}, mesh, {ts::Shard(1)}, torch::requires_grad());
    const at::Tensor target = ts::distribute_tensor(torch::zeros({4}, torch::kLong), mesh, {ts::Replicate()});
    // example: tessera/tensor_parallel/loss_parallel.h
    LossParallel scope;
    auto loss = torch::nn::functional::cross_entropy(logits, target);  // logits: [S(1)] on tp
    loss.backward();
    // end
  });
}

TEST(ApiTensorParallel, ContextParallel) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("cp=2");
    const auto q = torch::randn({1, 2, 4, 8}), k = torch::randn({1, 2, 4, 8}), v = torch::randn({1, 2, 4, 8});
    // example: tessera/tensor_parallel/context_parallel.h
    const ts::ContextParallelOptions options{.method = ts::ContextMethod::Ring,
                                             .rotate = ts::RotateMethod::AllToAll,
                                             .load_balance = ts::LoadBalance::HeadTail};
    const ts::ContextParallel scope(mesh["cp"], options);  // attention inside of it runs over all tokens of all ranks
    at::Tensor positions = ts::sequence_positions(4, torch::kCPU);  // of the 4 tokens of this rank
    EXPECT_EQ(ts::sequence_length(4), 8);
    auto y = torch::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
    // end
    EXPECT_EQ(y.sizes(), q.sizes());
    EXPECT_EQ(positions.size(0), 4);
  });
}

}  // namespace
}  // namespace tessera::docs_nn
