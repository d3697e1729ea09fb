#include "tessera/nn/holder.h"

#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using Linear = Holder<torch::nn::LinearImpl>;

struct HookedNetImpl : torch::nn::Cloneable<HookedNetImpl> {
  HookedNetImpl() { reset(); }
  void reset() override {
    up = register_module("up", Linear(3, 4));
    down = register_module("down", Linear(4, 3));
  }
  torch::Tensor forward(torch::Tensor x, double scale = 1) { return down(torch::relu(up(x))) * scale; }
  Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(HookedNet);

TEST(Holder, ReplacesTorchModuleHolder) {
  HookedNet net;
  const auto x = torch::randn({2, 3});
  EXPECT_EQ(net->parameters().size(), 4u);
  EXPECT_TRUE(torch::equal(net(x, 2.0), net(x) * 2));
  EXPECT_TRUE(torch::equal(net->forward(x, 2.0), net(x) * 2));
  EXPECT_EQ(net->named_parameters().keys()[0], "up.weight");
}

}  // namespace
}  // namespace tessera
