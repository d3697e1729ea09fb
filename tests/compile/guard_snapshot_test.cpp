// The copy of the memory that guards have read: unchanged memory means that the guards hold.
#include "tessera/compile/detail/api/module_guard.h"
#include "tessera/nn/hooks.h"
#include "tessera/nn/modules.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::compiler {
namespace {

struct GuardedNetImpl : torch::nn::Module {
  GuardedNetImpl() {
    fc = register_module("fc", nn::Linear(3, 3));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({2, 3}).elementwise_affine(false)));
    row = register_parameter("row", torch::randn({3}));
    state = register_buffer("state", torch::randn({3}));
  }
  void replace_row() { parameters_["row"] = torch::randn({3}); }
  nn::Linear fc{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  at::Tensor row, state;
  double scale = 0.5;
};
TORCH_MODULE(GuardedNet);

struct SnapshotCase {
  const char* name;
  void (*change)(GuardedNet& net);
};

const SnapshotCase kSnapshotCases[] = {
    {"eval mode", [](GuardedNet& net) { net->fc->eval(); }},
    {"frozen parameter", [](GuardedNet& net) { net->row.requires_grad_(false); }},
    {"dtype", [](GuardedNet& net) { net->state.set_data(torch::randn({3}, at::kDouble)); }},
    {"sizes", [](GuardedNet& net) { net->state.set_data(torch::randn({4})); }},
    {"strides",
     [](GuardedNet& net) {
       net->fc->weight.set_data(torch::randn({3, 3}).t());
     }},
    {"neg bit", [](GuardedNet& net) { net->state.unsafeGetTensorImpl()->_set_neg(true); }},
    {"another tensor", [](GuardedNet& net) { net->replace_row(); }},
    {"one more buffer", [](GuardedNet& net) { net->fc->register_buffer("one", torch::randn({3})); }},
    {"one more submodule", [](GuardedNet& net) { net->fc->register_module("one", nn::Linear(3, 3)); }},
    {"another submodule", [](GuardedNet& net) { net->replace_module("norm", torch::nn::ReLU()); }},
    {"number in a module", [](GuardedNet& net) { net->scale = 0.25; }},
    {"option", [](GuardedNet& net) { net->norm->options.eps(0.25); }},
    {"list in the options",
     [](GuardedNet& net) {
       const std::vector<int64_t> shape{3, 2};
       net->norm->options.normalized_shape(shape);
     }},
    {"hook of a module",
     [](GuardedNet& net) {
       register_forward_hook(*net->fc, [](Module&, const Tensors&, const Tensors& out) { return out; });
     }},
    {"hook on a gradient", [](GuardedNet& net) { net->row.register_hook([](const at::Tensor& g) { return g * 2; }); }},
    {"hook on an accumulator",
     [](GuardedNet& net) {
       static std::vector<decltype(torch::autograd::impl::grad_accumulator(at::Tensor()))> kept;
       kept.push_back(torch::autograd::impl::grad_accumulator(net->row));
     }},
};

TEST(GuardSnapshot, EachChangeIsSeen) {
  for (const auto& [name, change] : kSnapshotCases) {
    GuardedNet net;
    register_forward_hook(*net->fc, [](Module&, const Tensors&, const Tensors& out) { return out; });
    const ModuleGuard guard(*net, ModuleGuard::object_of(net.ptr()));
    GuardSnapshot snapshot;
    EXPECT_FALSE(snapshot.unchanged()) << "it is empty";
    ASSERT_TRUE(guard.add_to(snapshot));
    net->row.mutable_grad() = torch::randn({3});  // which no guard reads
    EXPECT_TRUE(snapshot.unchanged()) << name;
    change(net);
    EXPECT_FALSE(snapshot.unchanged()) << name;
  }
}

// What such tensors are like can change in memory that is not known: their guards are evaluated on each call.
TEST(GuardSnapshot, TensorsThatAreNotRemembered) {
  auto hooked = torch::randn({3}, torch::requires_grad());
  hooked.register_hook([](const at::Tensor& g) { return g; });
  const auto view = torch::randn({3}).view({3, 1}), six_dims = torch::randn({1, 1, 1, 1, 1, 1});
  for (const auto& t : {hooked, view, six_dims, torch::randn({3}).to_sparse()}) {
    GuardSnapshot snapshot;
    EXPECT_FALSE(TensorGuard(t).add_to(snapshot, t));
  }
}

}  // namespace
}  // namespace tessera::compiler
