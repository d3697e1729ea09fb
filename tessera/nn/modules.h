#pragma once
#include "tessera/nn/detail/module_list.h"
#include "tessera/nn/detail/rms_norm.h"
#include "tessera/nn/holder.h"

#include <torch/nn/modules.h>

#include <string>
#include <vector>

// The modules of torch::nn with holders that support hooks. Write tessera::nn::Linear(3, 4) instead of
// torch::nn::Linear(3, 4). The module classes are those of LibTorch. ModuleList, ModuleDict and RMSNorm are Tessera's
// own.
// clang-format off
#define TESSERA_FOR_EACH_TORCH_MODULE(X) \
  X(AdaptiveAvgPool1d) X(AdaptiveAvgPool2d) X(AdaptiveAvgPool3d) X(AdaptiveLogSoftmaxWithLoss) X(AdaptiveMaxPool1d)   \
  X(AdaptiveMaxPool2d) X(AdaptiveMaxPool3d) X(AlphaDropout) X(AvgPool1d) X(AvgPool2d) X(AvgPool3d) X(BatchNorm1d)     \
  X(BatchNorm2d) X(BatchNorm3d) X(BCELoss) X(BCEWithLogitsLoss) X(Bilinear) X(CELU) X(ConstantPad1d)                  \
  X(ConstantPad2d) X(ConstantPad3d) X(Conv1d) X(Conv2d) X(Conv3d) X(ConvTranspose1d) X(ConvTranspose2d)               \
  X(ConvTranspose3d) X(CosineEmbeddingLoss) X(CosineSimilarity) X(CrossEntropyLoss) X(CrossMapLRN2d) X(CTCLoss)       \
  X(Dropout) X(Dropout2d) X(Dropout3d) X(ELU) X(FeatureAlphaDropout) X(Flatten) X(Fold)  \
  X(FractionalMaxPool2d) X(FractionalMaxPool3d) X(Functional) X(GELU) X(GLU) X(GroupNorm) X(GRU) X(GRUCell)           \
  X(Hardshrink) X(Hardtanh) X(HingeEmbeddingLoss) X(HuberLoss) X(Identity) X(InstanceNorm1d) X(InstanceNorm2d)        \
  X(InstanceNorm3d) X(KLDivLoss) X(L1Loss) X(LayerNorm) X(LeakyReLU) X(Linear) X(LocalResponseNorm) X(LogSigmoid)     \
  X(LogSoftmax) X(LPPool1d) X(LPPool2d) X(LPPool3d) X(LSTM) X(LSTMCell) X(MarginRankingLoss) X(MaxPool1d)             \
  X(MaxPool2d) X(MaxPool3d) X(MaxUnpool1d) X(MaxUnpool2d) X(MaxUnpool3d) X(Mish) X(MSELoss) X(MultiheadAttention)     \
  X(MultiLabelMarginLoss) X(MultiLabelSoftMarginLoss) X(MultiMarginLoss) X(NLLLoss) X(PairwiseDistance)               \
  X(PixelShuffle) X(PixelUnshuffle) X(PoissonNLLLoss) X(PReLU) X(ReflectionPad1d) X(ReflectionPad2d)                  \
  X(ReflectionPad3d) X(ReLU) X(ReLU6) X(ReplicationPad1d) X(ReplicationPad2d) X(ReplicationPad3d) X(RNN) X(RNNCell)   \
  X(RReLU) X(SELU) X(Sigmoid) X(SiLU) X(SmoothL1Loss) X(SoftMarginLoss) X(Softmax) X(Softmax2d) X(Softmin)            \
  X(Softplus) X(Softshrink) X(Softsign) X(Tanh) X(Tanhshrink) X(Threshold) X(Transformer) X(TransformerDecoder)       \
  X(TransformerDecoderLayer) X(TransformerEncoder) X(TransformerEncoderLayer) X(TripletMarginLoss)                    \
  X(TripletMarginWithDistanceLoss) X(Unflatten) X(Unfold) X(Upsample) X(ZeroPad1d) X(ZeroPad2d) X(ZeroPad3d)
// clang-format on

namespace tessera::nn {

// The other names of torch::nn are here too: LinearOptions, Module, functional, init, utils. So a program that says
// `namespace nn = torch::nn;` gets modules with hooks from `namespace nn = tessera::nn;`.
using namespace torch::nn;  // NOLINT(google-build-using-namespace)

// tessera::nn::Linear and so on: the holders of the modules above.
#define TESSERA_HOLDER(Name) TESSERA_MODULE_IMPL(Name, ::torch::nn::Name##Impl);
TESSERA_FOR_EACH_TORCH_MODULE(TESSERA_HOLDER)
#undef TESSERA_HOLDER

// torch::nn::Embedding.
class Embedding : public Holder<torch::nn::EmbeddingImpl> {
 public:
  using Holder<torch::nn::EmbeddingImpl>::Holder;
  using Impl = torch::nn::EmbeddingImpl;
  // As in LibTorch.
  static Embedding from_pretrained(const at::Tensor& embeddings,
                                   const torch::nn::EmbeddingFromPretrainedOptions& options = {}) {
    return Embedding(std::make_shared<ContainedType>(*torch::nn::Embedding::from_pretrained(embeddings, options)));
  }
};

// torch::nn::EmbeddingBag.
class EmbeddingBag : public Holder<torch::nn::EmbeddingBagImpl> {
 public:
  using Holder<torch::nn::EmbeddingBagImpl>::Holder;
  using Impl = torch::nn::EmbeddingBagImpl;
  // As in LibTorch.
  static EmbeddingBag from_pretrained(const at::Tensor& embeddings,
                                      const torch::nn::EmbeddingBagFromPretrainedOptions& options = {}) {
    return EmbeddingBag(
        std::make_shared<ContainedType>(*torch::nn::EmbeddingBag::from_pretrained(embeddings, options)));
  }
};

// torch::nn::Sequential, whose children may be Tessera modules or torch::nn modules. Unlike in LibTorch, clone() keeps
// the names of the children.
class SequentialImpl : public torch::nn::SequentialImpl {
 public:
  using torch::nn::SequentialImpl::SequentialImpl;
  // A deep copy.
  std::shared_ptr<Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<SequentialImpl>();
    auto child = begin();
    for (const auto& item : named_children()) copy->push_back(item.key(), (child++)->clone(device));
    return copy;
  }
};

// The holder of SequentialImpl.
// Example:  nn::Sequential net(nn::Linear(3, 4), nn::ReLU());
class Sequential : public Holder<SequentialImpl> {
 public:
  using Holder<SequentialImpl>::Holder;
  using Impl = SequentialImpl;
  // As in LibTorch: empty, or with named children.
  Sequential() = default;
  Sequential(std::initializer_list<torch::nn::NamedAnyModule> children) : Holder(make(children)) {}

 private:
  static std::shared_ptr<ContainedType> make(std::initializer_list<torch::nn::NamedAnyModule> children) {
    auto made = std::make_shared<ContainedType>();
    for (const auto& child : children) made->push_back(child.name(), child.module());
    return made;
  }
};

// Low-rank adapters for fine-tuning (Hu et al. 2021): a Linear computes W x + b + alpha / rank B (A x). W and b are
// frozen, and A and B are trained.
//
//   nn::lora::add(*model, {.rank = 8, .targets = {"wq", "wv"}});       // before fully_shard and the optimizer
//   optim::AdamW optimizer(nn::lora::parameters(*model), {.lr = 1e-4});
//   nn::lora::merge(*model);                                           // after the training: the adapters are part of
//   W
namespace lora {

// Options of add.
struct Options {
  int64_t rank = 8;                       // rows of A, columns of B
  double alpha = 16;                      // the adapter's output is multiplied by alpha / rank
  std::vector<std::string> targets = {};  // names of Linear modules, or their last parts; empty: every Linear
};
// Adds the parameters lora_A and lora_B to Linear modules and freezes all other parameters. A is random, so use the
// same seed on all ranks, and B is 0: the module computes what it did before. Returns the names of these modules.
// Throws UsageError, and changes nothing, if a target has no Linear module with hooks (nn::Linear), or has an adapter
// already.
std::vector<std::string> add(Module& module, const Options& options = {});
// lora_A and lora_B of all adapters.
std::vector<at::Tensor> parameters(const Module& module);
// Adds alpha / rank B A to W and sets B to 0. The module computes the same as before. Requires: W, A and B are plain.
void merge(Module& module);

}  // namespace lora
}  // namespace tessera::nn
