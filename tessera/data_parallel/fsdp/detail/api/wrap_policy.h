#pragma once
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

// Policies for FSDPOptions::auto_wrap_policy: which inner modules FullyShardedDataParallel wraps separately.
namespace tessera {

// What a policy decides about. As in PyTorch it is called twice for each module: with recurse, before its children, and
// without, after them.
struct WrapQuestion {
  torch::nn::Module& module;  // the module
  bool recurse;               // true: return whether to visit the children. False: return whether to wrap the module
  int64_t numel;  // elements of its parameters; without recurse: not counting inner modules that are wrapped
};
// A policy.
using AutoWrapPolicy = std::function<bool(const WrapQuestion& question)>;

// Wraps modules that have at least min_num_params elements outside wrapped inner modules. Module lists and modules that
// cannot have hooks are not wrapped: their parameters belong to the module around them.
AutoWrapPolicy size_based_auto_wrap_policy(int64_t min_num_params = 100'000'000);

// Wraps every module for which `wraps` returns true.
AutoWrapPolicy lambda_auto_wrap_policy(std::function<bool(torch::nn::Module& module)> wraps);

namespace detail {

// The Impl of a holder, or T itself.
template <class T>
struct ImplOf {
  using Type = T;
};
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H>
struct ImplOf<H> {
  using Type = typename H::ContainedType;
};

}  // namespace detail

// Wraps every module of one of these classes, which may be holders or Impls.
// Example:  FSDPOptions{.auto_wrap_policy = transformer_auto_wrap_policy<models::GPT2Block>()}
template <class... Blocks>
AutoWrapPolicy transformer_auto_wrap_policy() {
  return lambda_auto_wrap_policy([](torch::nn::Module& module) {
    return ((dynamic_cast<const typename detail::ImplOf<Blocks>::Type*>(&module) != nullptr) || ...);
  });
}

namespace data_parallel::fsdp {

struct IgnoredModules;

// Internal: the modules below `root` that the policy wraps, inner ones first. The policy is not called for `root`.
std::vector<torch::nn::Module*> modules_to_wrap(torch::nn::Module& root, const AutoWrapPolicy& policy,
                                                const IgnoredModules& ignored);

}  // namespace data_parallel::fsdp
}  // namespace tessera
