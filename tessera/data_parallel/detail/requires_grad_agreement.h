#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/nn/grad_hooks.h"

#include <functional>
#include <string>
#include <vector>

// All ranks must freeze and unfreeze the same parameters: gradients of the others would be averaged with nothing.
namespace tessera::data_parallel {

// Which parameters are frozen, for the label of a collective. Ranks compare the labels of their collectives, so ranks
// that differ get an error instead of a wrong mean.
class RequiresGradHash {
 public:
  RequiresGradHash() = default;
  explicit RequiresGradHash(const std::vector<bool>& requires_grad);  // per parameter

  int32_t number(int32_t label) const { return label ^ hash_; }  // `label` itself if nothing is frozen
  const std::string& text() const { return text_; }              // ", 3 frozen", or ""

 private:
  int32_t hash_ = 0;
  std::string text_;
};

// Detects that parameters were frozen or unfrozen, and that ranks differ in it.
class RequiresGradAgreement {
 public:
  // Requires: the ranks have compared which of these parameters are frozen now.
  void start(const NamedTensors& parameters);

  // If parameters were frozen or unfrozen since start() or the last call: posts one collective on each group, whose
  // label has the name of the first such parameter and a hash of all. If another rank did not do the same, both have an
  // error at once: their collectives differ. Otherwise it does nothing.
  // `what` begins the message.
  void check(const std::string& what, const NamedTensors& parameters, const std::vector<comm::Group>& groups);

 private:
  std::vector<bool> agreed_;
};

// Calls `registered`, which registers a hook on a leaf, also if the leaf is frozen: LibTorch refuses hooks on tensors
// that do not require a gradient, but keeps them when requires_grad changes. Returns what it returns.
// A leaf that cannot have gradients (an integer) gets no hook.
GradHookHandle register_hook_on_any_leaf(const at::Tensor& leaf,
                                         const std::function<GradHookHandle(const at::Tensor&)>& registered);

}  // namespace tessera::data_parallel
