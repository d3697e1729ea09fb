#pragma once
#include "tessera/tracing/op_mode.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

// Finds ops that mix the tokens of a sequence in the scope of a ContextParallel. Each rank has only a part of the
// tokens, so such an op (the product of queries and keys in nn::MultiheadAttention, a convolution over the sequence, an
// RNN) would silently see the tokens of this rank only.
//
// The check knows which storages have tokens: ContextParallel::shard() and attention start with it, and every op passes
// it on to its results. A view of a storage needs no rule: its strides say which of its dims run over tokens.
//
//   storage of x (B, t, C)       tokens of C elements, t of them in a row
//   x.view({B * t, C})           dim 0 runs over tokens
//   x.transpose(1, 2)            dim 2
namespace tessera {

// While alive, an op of this thread that mixes tokens throws UsageError. Backward is not checked.
class TokenMixingCheck final : public OpMode {
 public:
  TokenMixingCheck();
  ~TokenMixingCheck() override;
  TokenMixingCheck(const TokenMixingCheck&) = delete;
  TokenMixingCheck& operator=(const TokenMixingCheck&) = delete;

  // The innermost one of this thread, or null.
  static TokenMixingCheck* current();
  // `dim` of x runs over tokens.
  void note_tokens(const at::Tensor& x, int64_t dim);
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;

  // Whether a dim runs over tokens: index i has the token i / inner % count. inner = 0: it does not. A suspect may run
  // over tokens: the second dim of a product of activations of which nothing is known.
  struct TokenDim {
    int64_t inner = 0, count = 0;
    bool suspect = false;
    bool is_tokens() const { return inner > 0 && !suspect; }
  };
  struct Operand {
    at::Tensor tensor;
    std::vector<TokenDim> dims;  // as many as the tensor has
  };

 private:
  // The tokens in a storage: `count` tokens in a row, of `bytes` each.
  struct TokenLayout {
    int64_t bytes = 0, count = 0;
    bool suspect = false;
  };
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<TokenLayout> layouts;
  };
  Operand operand_of(const at::Tensor& x) const;
  bool is_known(const at::Tensor& x) const;
  void note(const at::Tensor& x, const std::vector<TokenDim>& dims);

  std::unordered_map<const c10::StorageImpl*, Known> known_;
  size_t next_cleanup_ = 256;
  TokenMixingCheck* outer_check_;
  OpModeScope scope_;
};

// While alive, ops of this thread are not checked: those of context-parallel attention.
class TokenMixingAllowed {
 public:
  TokenMixingAllowed();
  ~TokenMixingAllowed();
  TokenMixingAllowed(const TokenMixingAllowed&) = delete;
};

}  // namespace tessera
