// Sections of a fused weight with a block per head: heads that are not divisible by the ranks.
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/attention_heads.h"
#include "tessera/nn/modules.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

struct FusedHeadsImpl : torch::nn::Module, AttentionHeads {
  explicit FusedHeadsImpl(int64_t heads) {
    qkv = register_module("qkv", nn::Linear(4 * heads, 12 * heads));
    wo = register_module("wo", nn::Linear(4 * heads, 4 * heads));
    torch::NoGradGuard no_grad;
    const random::SeedScope seed(3);
    for (auto& p : parameters()) random::uniform_(p, -0.5, 0.5);
  }
  int64_t head_dim() const override { return 4; }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = qkv(x).chunk(3, -1);
    const auto heads = [&](const torch::Tensor& t) { return t.unflatten(2, {t.size(2) / 4, 4}).transpose(1, 2); };
    const auto y = torch::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]), {}, 0.3);
    return wo(y.transpose(1, 2).flatten(2));
  }
  nn::Linear qkv{nullptr}, wo{nullptr};
};
TESSERA_MODULE(FusedHeads);

TEST(TrustSections, BlocksKeepHeadsTogetherInEverySection) {
  for (const int64_t heads : {3, 4, 5, 6})
    for (const int64_t n : {2, 3, 4}) {
      SCOPED_TRACE(c10::str(heads, " heads, ", n, " ranks"));
      run_ranks(n, [&](Rank& me) {
        FusedHeads model(heads);
        const auto mesh = me.mesh("tp=" + std::to_string(n));
        const Plan plan{{"qkv", ColwiseParallel{.block = 4, .sections = 3}}, {"wo", RowwiseParallel{.block = 4}}};
        const Plan without{{"qkv", ColwiseParallel{.sections = 3}}, {"wo", RowwiseParallel()}};
        if (heads % n != 0)
          EXPECT_ERROR(UsageError, parallelize_module(model, mesh, without), "'qkv'", "would split a head", "block=4");
        check_parallel(model, mesh, plan, torch::linspace(-1, 1, 24 * heads).view({2, 3, 4 * heads}));
        parallelize_module(model, mesh, plan);
        const auto each = (heads + n - 1) / n;  // heads per rank, fewer on the last ones
        const auto mine = std::clamp<int64_t>(heads - me.rank * each, 0, each);
        EXPECT_EQ(DTensor(model->qkv->weight.detach()).to_local().size(0), 3 * 4 * mine);
        EXPECT_EQ(DTensor(model->qkv->weight.detach()).full_tensor().size(0), 12 * heads);
      });
    }
}

TEST(TrustSections, BlocksThatDoNotFitThrow) {
  run_ranks(2, [](Rank& me) {
    nn::Linear qkv(8, 24);
    const auto mesh = me.mesh("tp=2");
    EXPECT_ERROR(UsageError, parallelize_module(qkv, mesh, ColwiseParallel{.block = 3, .sections = 3}), "24 features",
                 "3 equal sections of complete blocks of 3");
    EXPECT_ERROR(UsageError, parallelize_module(qkv, mesh, ColwiseParallel{.sections = 8}), "8 sections of 3 features",
                 "not divisible by 2 ranks", "block");
    parallelize_module(qkv, mesh, ColwiseParallel{.block = 4, .sections = 3});
    EXPECT_EQ(c10::str(DTensor(qkv->weight.detach()).placements()[0]), "SS(0,3)");  // even: the block is redundant
  });
}

}  // namespace
}  // namespace tessera
