// The examples of the API reference: data_parallel, compile.
#include "docs/fixtures.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

#include <iostream>

namespace tessera::docs_data_parallel {
namespace {

namespace ts = tessera;
using ts::testing::Rank;
using ts::testing::run_ranks;

using docs::FeedForward;
using docs::FeedForwardImpl;
using docs::train_step;

struct ModelImpl : torch::nn::Module {
  ts::nn::Embedding embedding = register_module("embedding", ts::nn::Embedding(4, 4));
  ts::nn::ModuleList<FeedForward> blocks = register_module("blocks", ts::nn::ModuleList<FeedForward>());
  ts::nn::LayerNorm norm = register_module("norm", ts::nn::LayerNorm(std::vector<int64_t>{4}));
  ts::nn::Linear head = register_module("head", ts::nn::Linear(4, 4));
  ModelImpl() {
    for (int i = 0; i < 2; i++) blocks->push_back(FeedForward(4));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : *blocks) x = block(x);
    return head(norm(x)) + embedding->weight.sum();
  }
  at::Tensor encode(const at::Tensor& x) { return head(x); }
};
TESSERA_MODULE(Model);

struct NetImpl : torch::nn::Module {
  ts::nn::BatchNorm1d bn = register_module("bn", ts::nn::BatchNorm1d(4));
  at::Tensor forward(const at::Tensor& x) { return bn(x); }
};
TESSERA_MODULE(Net);

TEST(ApiDataParallel, DistributedDataParallel) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    const auto x = torch::ones({2, 512}), y = x;
    // example: tessera/data_parallel/distributed_data_parallel.h
    FeedForward model(512);
    DistributedDataParallel ddp(model);  // or (model, {.device_mesh = mesh["dp"]})
    optim::AdamW opt(ddp->parameters(), {.lr = 3e-4});
    torch::mse_loss(ddp(x), y).backward();  // gradients are averaged when this returns
    opt.step();
    std::vector<ts::DistributedParameter> sharded =
        ts::pre_dp_module_transform(*model);  // parameters that are DTensors
    // end
    EXPECT_TRUE(sharded.empty());
  });
}

// example: tessera/data_parallel/comm_hook.h
struct OwnAllGather : ts::AllGather {
  ts::comm::Work operator()(at::Tensor& output, const at::Tensor& input, const ts::comm::Group& group,
                            bool async_op) override {
    return group->all_gather_into_tensor(output, input);
  }
};
struct OwnReduceScatter : ts::ReduceScatter {
  ts::comm::Work operator()(at::Tensor& output, const at::Tensor& input, const ts::comm::Group& group, ts::ReduceOp op,
                            bool async_op) override {
    return group->reduce_scatter_tensor(output, input, op);
  }
};
// end

struct MyState {
  int calls = 0;
};

TEST(ApiDataParallel, CommHooks) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    const auto x = torch::ones({2, 4});
    {
      DistributedDataParallel ddp{FeedForward(4)};
      MyState my_state;
      // example: tessera/data_parallel/comm_hook.h
      ddp->register_comm_hook(my_state, [](MyState& state, GradBucket& bucket) {
        auto x = bucket.buffer().div_(bucket.group()->size());
        return funcol::all_reduce(x, ReduceOp::Sum, bucket.group());  // starts it; DDP waits for it
      });
      // end
      ddp(x).sum().backward();
    }
    {
      DistributedDataParallel ddp{FeedForward(4)};
      // example: tessera/data_parallel/comm_hook.h
      ddp->register_comm_hook(std::make_shared<PowerSGDState>(), powerSGD_hook);
      // end
      ddp(x).sum().backward();
    }
    {
      FeedForward model(4);
      DistributedDataParallel ddp(model);
      std::map<at::TensorImpl*, ts::optim::SGD> optimizers;
      for (auto& p : model->parameters())
        optimizers.try_emplace(p.unsafeGetTensorImpl(), std::vector<at::Tensor>{p}, ts::optim::SGDOptions{.lr = 0.1});
      // example: tessera/data_parallel/comm_hook.h
      const ts::ParameterStep step = [&](const at::Tensor& p) { optimizers.at(p.unsafeGetTensorImpl()).step(); };
      ddp->step_in_backward([&](const at::Tensor& p) { optimizers.at(p.unsafeGetTensorImpl()).step(); });
      // end
      ddp(x).sum().backward();
    }
    for (const int which : {0, 1, 2}) {
      DistributedDataParallel ddp{FeedForward(4)};
      // example: tessera/data_parallel/comm_hook.h
      if (which == 0) ddp->register_comm_hook(ts::comm::Group(), ts::allreduce_hook);  // {}: the bucket's group
      if (which == 1) ddp->register_comm_hook(ts::comm::Group(), ts::fp16_compress_hook);
      if (which == 2) ddp->register_comm_hook(ts::comm::Group(), ts::bf16_compress_hook);
      const ts::CommHook bound =
          ts::make_comm_hook(ts::comm::Group(), [](ts::comm::Group& group, ts::GradBucket& bucket) {
            return ts::BucketResult(bucket.buffer());  // no reduction
          });
      // end
      ddp(x).sum().backward();
    }
    FeedForward sharded(4);
    ts::fully_shard(sharded, {.mesh = mesh});
    // example: tessera/data_parallel/comm_hook.h
    ts::fsdp_module(sharded).set_custom_all_gather(std::make_shared<OwnAllGather>());
    ts::fsdp_module(sharded).set_custom_reduce_scatter(std::make_shared<OwnReduceScatter>());
    // end
    sharded(x).sum().backward();
    FeedForward flat(4);
    ts::FullyShardedDataParallel fsdp(flat, {.device_mesh = mesh});
    // example: tessera/data_parallel/comm_hook.h
    fsdp->register_comm_hook(ts::comm_hooks::DefaultState(me.group()), [](ts::comm_hooks::DefaultState& state,
                                                                          at::Tensor& grad, at::Tensor& output) {
      ts::comm_hooks::reduce_scatter_hook(state, grad, output);  // or fp16_compress_hook, bf16_compress_hook
    });
    // end
    fsdp(x).sum().backward();
  });
}

TEST(ApiDataParallel, FullyShard) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    Model first, model;
    const auto x = torch::ones({2, 4});
    {
      auto& blocks = *first->blocks;
      struct {
        std::vector<FeedForward> blocks;
      } list{{blocks.begin(), blocks.end()}};
      const auto shard_all = [&](auto* model) {
        // example: tessera/data_parallel/fsdp/fully_shard.h
        for (auto& block : model->blocks) fully_shard(block, {.mesh = mesh["dp"]});
        // end
      };
      shard_all(&list);
    }
    {
      Model& model = first;
      // example: tessera/data_parallel/fsdp/fully_shard.h
      fully_shard(model, {.mesh = mesh["dp"]});
      fsdp_module(model).set_requires_gradient_sync(false);
      // end
      model(x).sum().backward();
    }
    // example: tessera/data_parallel/fsdp/fully_shard.h
    fully_shard({model->norm.ptr(), model->head.ptr()}, {.mesh = mesh["dp"]});
    ts::FullyShardOptions options{.mesh = mesh["dp"]};
    options.mp_policy = ts::MixedPrecisionPolicy{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    options.offload_policy = ts::CPUOffloadPolicy();  // or {} for none:
    const ts::OffloadPolicy none{.offload = false};
    options.reshard_after_forward = ts::ReshardAfterForward(false);  // faster, more memory
    Model mixed;
    ts::fully_shard(mixed, options);
    // end
    model = Model();
    ts::fully_shard(model, {.mesh = mesh["dp"]});
    // example: tessera/data_parallel/fsdp/fsdp_module.h
    fsdp_module(model).set_requires_gradient_sync(false);
    ts::FSDPModule sharded = ts::fsdp_module(*model);
    ts::UnshardHandle handle = sharded.unshard(/*async_op=*/true);
    handle.wait();  // the parameters are unsharded
    sharded.reshard();
    at::Tensor y;
    auto encode = register_fsdp_forward_method(model, &ModelImpl::encode);
    y = encode(x);
    // end
    EXPECT_EQ(y.size(1), 4);
  });
}

TEST(ApiDataParallel, FullyShardedDataParallel) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    Model model;
    const auto x = torch::ones({2, 4});
    // example: tessera/data_parallel/fsdp/fully_sharded_data_parallel.h
    FullyShardedDataParallel fsdp(model, {.device_mesh = mesh["dp"]});
    optim::AdamW opt(fsdp->parameters());  // one flat parameter; with use_orig_params the original parameters
    fsdp(x).sum().backward();
    fsdp->clip_grad_norm_(1.0);
    // end
    opt.step();
    // example: tessera/data_parallel/fsdp/fully_sharded_data_parallel.h
    {
      const ts::FSDPNoSync no_sync(*fsdp);  // what fsdp->no_sync() returns
      fsdp(x).sum().backward();             // gradients stay on this rank
    }
    // end
    // example: tessera/data_parallel/fsdp/summon_full_params.h
    {
      const SummonFullParams full(*model);
      torch::NoGradGuard no_grad;
      model->embedding->weight.mul_(0.5);
    }
    const ts::SummonOptions read_only{.writeback = false, .offload_to_cpu = true};
    ts::SummonFullParams full(*model, read_only);
    full.close();
    { auto full = summon_full_params(*model); }
    // end
    // example: tessera/data_parallel/fsdp/state_dict.h
    const ts::StateDictOptions full_on_rank_0{.full_state_dict = true, .cpu_offload = true, .rank0_only = true};
    ts::StateDict dict = ts::get_model_state_dict(*model, full_on_rank_0);
    ts::LoadReport report =
        ts::set_model_state_dict(*model, dict, {.full_state_dict = true, .broadcast_from_rank0 = true});
    // end
    EXPECT_TRUE(report.empty());
  });
}

TEST(ApiDataParallel, WrapPolicy) {
  run_ranks(2, [](Rank& me) {
    // example: tessera/data_parallel/fsdp/wrap_policy.h
    const ts::AutoWrapPolicy large = ts::size_based_auto_wrap_policy(/*min_num_params=*/1000);
    const ts::AutoWrapPolicy linears =
        ts::lambda_auto_wrap_policy([](torch::nn::Module& m) { return m.as<torch::nn::LinearImpl>() != nullptr; });
    const ts::AutoWrapPolicy blocks = ts::transformer_auto_wrap_policy<FeedForwardImpl>();
    const ts::AutoWrapPolicy own = [](const ts::WrapQuestion& question) {
      return question.recurse || question.numel > 10;
    };
    ts::FullyShardedDataParallel fsdp(Model(), {.auto_wrap_policy = blocks});
    const auto of_gpt2 = FSDPOptions{.auto_wrap_policy = transformer_auto_wrap_policy<models::GPT2Block>()};
    // end
    EXPECT_EQ(fsdp->flat_params().size(), 3);
  });
}

TEST(ApiDataParallel, ReplicateAndBatchNorm) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    {
      FeedForward model(4);
      // example: tessera/data_parallel/reducer_mode.h
      ReducerModeScope per_parameter(ReducerMode::PerParameter);
      replicate(model);
      std::cout << ts::ReducerMode::PerParameter << "\n";  // PyTorch's name: python_reducer
      // end
    }
    FeedForward another(4);
    // example: tessera/data_parallel/replicate.h
    ts::ReplicateOptions options;
    options.ignored_modules = {another->down.ptr().get()};  // its gradients are not averaged
    ts::replicate(another, options);
    // end
    Net model;
    // example: tessera/data_parallel/sync_batch_norm.h
    convert_sync_batchnorm(*model);
    // end
    {
      Net model;
      // example: tessera/data_parallel/sync_batch_norm.h
      convert_sync_batchnorm(*model, mesh["dp"]);
      // end
    }
    // example: tessera/data_parallel/sync_batch_norm.h
    DistributedDataParallel ddp(convert_sync_batchnorm(Net()));
    nn::SyncBatchNorm norm(torch::nn::BatchNormOptions(64).eps(1e-3), mesh.get_group("dp"));
    // end
    EXPECT_EQ(norm(torch::randn({2, 64})).size(1), 64);
    EXPECT_EQ(ddp(torch::randn({2, 4})).size(1), 4);
  });
}

// example: tessera/compile/api/compile.h
struct Batch {
  at::Tensor x, y;
  friend void tessera_visit(Batch& b, auto&& field) { field(b.x), field(b.y); }
};
// end

at::Tensor loss(const at::Tensor& x) { return x.pow(2).mean(); }
at::Tensor penalty(const at::Tensor& x) { return x.abs().mean(); }

TEST(ApiCompile, Compile) {
  ts::nn::Linear model(4, 4);
  ts::optim::SGD opt(model->parameters(), {.lr = 0.1});
  const Batch batch{torch::ones({2, 4}), torch::zeros({2, 4})};
  const auto x = batch.x;
  {
    // example: tessera/compile/api/compile.h
    auto step = compile([](auto& model, auto& opt, const Batch& batch) {
      opt.zero_grad();
      auto loss = torch::mse_loss(model(batch.x), batch.y);
      loss.backward();
      opt.step();
      return loss;
    });
    for (int i = 0; i < 3; i++) step(model, opt, batch);
    // end
    EXPECT_EQ(step.cache().size(), 1);
  }
  {
    // example: tessera/compile/api/compile.h
    double beta = 0;
    auto step = compile([&, beta = live(beta)](const at::Tensor& x) { return loss(x) + beta.value() * penalty(x); });
    const ts::Live<double> same = ts::live(beta);  // what the step captures
    beta = 0.5;                                    // no new compilation
    step(x);
    // end
    EXPECT_EQ(static_cast<double>(same), 0.5);
  }
  // example: tessera/compile/api/compile.h
  auto compiled = compile(model);
  auto loss = compiled(x).sum();
  loss.backward();
  ts::CompiledModule<ts::nn::Linear>& as_type = compiled;
  auto double_it = [](const at::Tensor& a) { return a * 2; };
  ts::CompiledStep<decltype(double_it)> function = ts::compile(double_it);
  at::Tensor doubled = function(x);
  // end
  EXPECT_EQ(as_type.cache().size(), 1);
}

TEST(ApiCompile, Backward) {
  ts::nn::Linear model(4, 4);
  {
    auto loss = model(torch::ones({2, 4})).sum();
    // example: tessera/compile/api/compile_backward.h
    auto scope = compile_backward({.passes = {{"fuse_ddp_with_coalesced_op", "schedule_comm_wait"}}});
    loss.backward();
    std::cout << scope.programs()[0]->listing();
    // end
  }
  auto loss = model(torch::ones({2, 4})).sum();
  // example: tessera/compile/api/compile_backward.h
  auto scope = compile_backward([](const compiler::Program& program) {
    return [program](const Tensors& inputs) { return compiler::interpret(program, inputs); };
  });
  ts::CompiledBackwardScope& same = scope;
  loss.backward();
  ts::reset_compile_caches();
  // end
  EXPECT_EQ(same.programs().size(), 1);
  // example: tessera/compile/api/counters.h
  ts::Counters& counters = ts::counters();
  std::cout << counters["inductor"]["ddp_buckets"] << " buckets\n";  // how many buckets fuse_ddp_* made
  // end
}

TEST(ApiCompile, Options) {
  const auto x = torch::ones({4});
  static constexpr int64_t times = 0;
  // example: tessera/compile/api/options.h
  const CompileScope scope({.codegen = false});
  const ts::PassList passes{PassChoice{"fold_views"},
                            PassChoice{"merge_collectives(bytes=26214400)"},  // a built-in pass with settings
                            PassChoice{compiler::Pass{"mine", [](compiler::Program& p) {
                                                        ;
                                                        return compiler::Matched{times};
                                                      }}}};
  const ts::CompileOptions options{
      .passes = passes, .captures = ts::Captures::None, .agree = ts::Agree::OnError, .numerics = ts::Numerics::Strict};
  auto step = ts::compile([](const at::Tensor& a) { return a + 1; }, options);
  step(x);
  // end
  EXPECT_EQ(step.cache().size(), 1);
}

TEST(ApiCompile, DataParallel) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    torch::manual_seed(7);
    ts::nn::Linear model(4, 4);
    ts::optim::SGD opt(model->parameters(), {.lr = 0.1});
    const auto batch_of_this_rank = torch::ones({2, 4});
    // example: tessera/compile/api/data_parallel.h
    auto step = compile(train_step, {.parallel_mode = DataParallel("fully_shard", {.mesh = mesh["dp"]})});
    for (int i = 0; i < 2; i++) step(model, opt, batch_of_this_rank);
    const ts::DataParallelOptions options{.mesh = mesh["dp"],
                                          .shard_at_least = 1024};  // smaller parameters are replicated
    // end
    EXPECT_EQ(options.input_batch_dim, 0);
  });
}

}  // namespace
}  // namespace tessera::docs_data_parallel
