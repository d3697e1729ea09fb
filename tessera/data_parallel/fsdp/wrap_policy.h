#pragma once
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

// Which modules of a tree become units of their own.
namespace tessera {

// What a policy is asked, of each module twice, as PyTorch asks: going down, whether to look at what is inside; coming
// back up, whether to wrap it.
struct WrapQuestion {
  torch::nn::Module& module;
  bool recurse;   // going down
  int64_t numel;  // of its parameters; coming up: without those of modules inside that are wrapped
};
using AutoWrapPolicy = std::function<bool(const WrapQuestion& question)>;

// Modules of at least so many elements that are not in smaller ones. Lists of modules and others that cannot have hooks
// are left to the module around them.
AutoWrapPolicy size_based_auto_wrap_policy(int64_t min_num_params = 100'000'000);

// Every module for which it holds.
AutoWrapPolicy lambda_auto_wrap_policy(std::function<bool(torch::nn::Module& module)> wraps);

namespace detail {

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

// Every module of one of these classes, given as holders or as Impls.
// Example:  FSDPOptions{.auto_wrap_policy = transformer_auto_wrap_policy<models::GPT2Block>()}
template <class... Blocks>
AutoWrapPolicy transformer_auto_wrap_policy() {
  return lambda_auto_wrap_policy([](torch::nn::Module& module) {
    return ((dynamic_cast<const typename detail::ImplOf<Blocks>::Type*>(&module) != nullptr) || ...);
  });
}

namespace data_parallel::fsdp {

struct Ignored;

// The modules below `root` that the policy wraps, inner ones first. `root` itself is not asked for.
std::vector<torch::nn::Module*> modules_to_wrap(torch::nn::Module& root, const AutoWrapPolicy& policy,
                                                const Ignored& ignored);

}  // namespace data_parallel::fsdp
}  // namespace tessera
