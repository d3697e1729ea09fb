#include "tessera/data_parallel/fsdp/detail/api/wrap_policy.h"

#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/data_parallel.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;

models::MLPStacked stack() { return models::MLPStacked(3); }  // each MLP: 160 + 16 + 160 + 10 = 346 elements

std::vector<std::string> wrapped(const AutoWrapPolicy& policy, const FSDPOptions& others = {}) {
  std::vector<std::string> names;
  run_ranks(1, [&](Rank&) {
    auto model = stack();
    auto options = others;
    options.auto_wrap_policy = policy;
    FullyShardedDataParallel fsdp(model, options);
    for (const auto& item : model->named_modules("", true)) {
      const auto units = fsdp_modules(*model);
      if (std::find(units.begin(), units.end(), item.value().get()) != units.end()) names.push_back(item.key());
    }
  });
  return names;
}
using Names = std::vector<std::string>;

TEST(WrapPolicy, ByType) {
  EXPECT_EQ(wrapped(transformer_auto_wrap_policy<models::MLP>()), (Names{"", "layers.0", "layers.1", "layers.2"}));
  EXPECT_EQ(wrapped(transformer_auto_wrap_policy<models::MLPImpl>()), (Names{"", "layers.0", "layers.1", "layers.2"}));
  const auto both = wrapped(transformer_auto_wrap_policy<models::MLP, nn::Linear>());
  EXPECT_EQ(both.size(), 1 + 3 + 6);
}

TEST(WrapPolicy, ByLambda) {
  int asked = 0;
  EXPECT_EQ(wrapped(lambda_auto_wrap_policy([&](torch::nn::Module& module) {
              asked++;
              const auto* linear = dynamic_cast<nn::Linear::ContainedType*>(&module);
              return linear && linear->options.in_features() == 16;
            })),
            (Names{"", "layers.0.net2", "layers.1.net2", "layers.2.net2"}));
  EXPECT_EQ(asked, 3 * 3 + 1);  // all modules except the root, including the list
}

// Wraps the smallest modules that are large enough. Other parameters belong to the module around them.
TEST(WrapPolicy, BySize) {
  EXPECT_EQ(wrapped(size_based_auto_wrap_policy(300)), (Names{"", "layers.0", "layers.1", "layers.2"}));
  // net1 has 176, net2 170. The MLP without net1 is too small.
  EXPECT_EQ(wrapped(size_based_auto_wrap_policy(175)), (Names{"", "layers.0.net1", "layers.1.net1", "layers.2.net1"}));
  EXPECT_EQ(wrapped(size_based_auto_wrap_policy(500)), Names{""});  // the list is large enough, but has no forward
}

TEST(WrapPolicy, TrainsLikeThePlainModule) {
  const auto start = stack();
  const auto data = batches(2);
  for (const auto& policy : {transformer_auto_wrap_policy<models::MLP>(), size_based_auto_wrap_policy(175)})
    for (const bool use_orig_params : {false, true})
      run_ranks(2, [&](Rank& me) {
        auto plain = clone(start), model = clone(start);
        FullyShardedDataParallel fsdp(
            model, {.device_mesh = me.mesh("dp=2"), .use_orig_params = use_orig_params, .auto_wrap_policy = policy});
        optim::SGD plain_opt(plain->parameters(), {.lr = 0.5}), opt(fsdp->parameters(), {.lr = 0.5});
        for (int step = 0; step < 3; step++) {
          plain_opt.zero_grad();
          opt.zero_grad();
          accumulate_means(plain, data, [](auto& m, const at::Tensor& x) { return m(x).pow(2).mean(); });
          fsdp(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
          plain_opt.step();
          opt.step();
        }
        const SummonFullParams full(*model);
        EXPECT_EQ(close(values_of(*model), values_of(*plain)), "");
      });
}

TEST(WrapPolicy, Errors) {
  run_ranks(1, [](Rank&) {
    auto model = stack();
    FullyShardedDataParallel inner(model->layers[1]);
    EXPECT_ERROR(UsageError,
                 FullyShardedDataParallel(model, {.auto_wrap_policy = transformer_auto_wrap_policy<models::MLP>()}),
                 "layers.1 (MLP) is sharded already");
    EXPECT_EQ(fsdp_modules(*model).size(), 1);  // nothing was wrapped
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(model->layers), "is a list of modules");
  });
}

struct TimesImpl : torch::nn::Cloneable<TimesImpl> {
  explicit TimesImpl(torch::Tensor shared) : weight(register_parameter("weight", std::move(shared))) {}
  void reset() override {}
  torch::Tensor forward(torch::Tensor x) { return x.mm(weight); }
  torch::Tensor weight;
};
TESSERA_MODULE(Times);

struct TwiceImpl : torch::nn::Cloneable<TwiceImpl> {
  TwiceImpl() {
    // The same values on every rank: ranks are threads and share a generator.
    first = register_module("first", Times(torch::arange(36, torch::kFloat).sin().view({6, 6})));
    second = register_module("second", Times(first->weight));
  }
  void reset() override {}
  torch::Tensor forward(torch::Tensor x) { return second(torch::relu(first(x))); }
  Times first{nullptr}, second{nullptr};
};
TESSERA_MODULE(Twice);

// Two modules may share a parameter if both are in one group.
TEST(WrapPolicy, SharedParameters) {
  const auto x = torch::randn({3, 6});
  Twice plain;
  plain(x).sum().backward();
  run_ranks(2, [&](Rank&) {
    for (const bool use_orig_params : {false, true}) {
      Twice model;
      FullyShardedDataParallel fsdp(model, {.use_orig_params = use_orig_params});
      EXPECT_EQ(fsdp->flat_params()[0].numel(), 18);
      EXPECT_EQ(model->parameters().size(), use_orig_params ? 2 : 1);  // LibTorch lists a shared parameter twice
      fsdp(x).sum().backward();
      const auto rank = World::current().rank();
      EXPECT_EQ(close(fsdp->flat_params()[0].grad(), plain->first->weight.grad().flatten().chunk(2)[rank]), "");
      const SummonFullParams full(*model);
      EXPECT_TRUE(model->first->weight.is_same(model->second->weight));
      EXPECT_EQ(model->named_parameters().keys(), (Names{"first.weight", "second.weight"}));
    }
    Twice model;
    EXPECT_ERROR(UsageError,
                 FullyShardedDataParallel(model, {.auto_wrap_policy = transformer_auto_wrap_policy<Times>()}),
                 "parameter weight of Times is also one of Times");
    EXPECT_TRUE(fsdp_modules(*model).empty());
    FullyShardedDataParallel inner(model->first);
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(model), "parameter second.weight is sharded already");
  });
}

}  // namespace
}  // namespace tessera
