#pragma once
#include "tessera/base/visit.h"
#include "tessera/comm/communicator.h"

#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera {

namespace data_parallel::fsdp {
struct ShardedModule;
struct Turn;
}  // namespace data_parallel::fsdp

// What becomes of a unit's whole parameters after forward.
//   none     let go of, except the root's
//   true     let go of: gathered again in backward
//   false    they stay until backward is through: faster and larger
//   a number they stay cut among groups of that many ranks, which must divide the ranks: gathered again over a few
//            neighbours only. 1 is false, and all of them is true.
class ReshardAfterForward {
 public:
  ReshardAfterForward() = default;
  template <std::same_as<bool> B>
  ReshardAfterForward(B yes) : yes_(yes) {}  // NOLINT(google-explicit-constructor)
  template <std::integral I>
  requires(!std::same_as<I, bool>) ReshardAfterForward(I ranks)  // NOLINT(google-explicit-constructor)
      : ranks_(static_cast<int64_t>(ranks)) {}

  void apply(data_parallel::fsdp::Turn& turn, const comm::Group& shards) const;  // throws UsageError

 private:
  std::optional<bool> yes_;
  std::optional<int64_t> ranks_;
};

// A gather under way.
class UnshardHandle {
 public:
  UnshardHandle() = default;
  explicit UnshardHandle(std::shared_ptr<data_parallel::fsdp::Turn> turn) : turn_(std::move(turn)) {}
  void wait();  // the parameters are whole when it returns

 private:
  std::shared_ptr<data_parallel::fsdp::Turn> turn_;
};

// What can be said to a module that was given to fully_shard, with PyTorch's names. Setters with `recurse` also speak
// to the sharded modules below. Example:  fsdp_module(*model).set_requires_gradient_sync(false);
class FSDPModule {
 public:
  FSDPModule(std::shared_ptr<data_parallel::fsdp::ShardedModule> state, torch::nn::Module& module);

  // Makes this module's parameters whole (those of sharded modules below stay as they are). Async: begins to.
  UnshardHandle unshard(bool async_op = false);
  void reshard();

  // False: gradients are kept whole, on this rank, for a later backward that reduces them.
  void set_requires_gradient_sync(bool sync, bool recurse = true);
  // HSDP. False: gradients are reduced over the ranks that cut, and kept for a later all-reduce over the copies.
  void set_requires_all_reduce(bool all_reduce, bool recurse = true);
  void set_reshard_after_forward(bool reshard, bool recurse = true);
  // False: a backward leaves the gathered parameters where the next forward finds them, if they do not change until
  // then. For accumulation of gradients.
  void set_reshard_after_backward(bool reshard, bool recurse = true);
  // False: backward does not wait for its reductions when it ends. Read .grad after the last one.
  void set_is_last_backward(bool last);
  // Which are gathered while this one computes, in place of the one that comes next.
  void set_modules_to_forward_prefetch(const std::vector<std::reference_wrapper<torch::nn::Module>>& modules);
  void set_modules_to_backward_prefetch(const std::vector<std::reference_wrapper<torch::nn::Module>>& modules);
  // The sum of gradients is divided by this, not by the number of ranks.
  void set_gradient_divide_factor(double factor);
  // False: backward does not need the values of this module's parameters (an embedding), and they are not gathered.
  void set_unshard_in_backward(bool unshard);
  // After an error that was caught: as before the step. Runs by itself where an error passes through the outermost
  // forward or through backward(); call it where one was caught half-way.
  void reset_iter_state();

 private:
  template <class F>
  void for_each(bool recurse, F f);

  std::shared_ptr<data_parallel::fsdp::ShardedModule> state_;
  torch::nn::Module* module_;
};

// Of a module that was given to fully_shard; UsageError for others.
FSDPModule fsdp_module(torch::nn::Module& module);

namespace detail {

// Runs `call` as the module's forward; as it is where the module is not sharded.
Tensors run_as_forward(torch::nn::Module& module, const Tensors& inputs,
                       const std::function<Tensors(const Tensors&)>& call);

}  // namespace detail

// A method beside forward that uses the module's parameters, as a function that gathers them and lets go of them as
// forward does. C++ methods cannot be replaced: call what this returns.
// Example:  auto encode = register_fsdp_forward_method(model, &ModelImpl::encode);    y = encode(x);
template <class H, class Method>
auto register_fsdp_forward_method(H& holder, Method method) {
  return [module = holder.ptr(), method](auto... args) {
    using R = decltype(((*module).*method)(args...));
    static_assert(!std::is_void_v<R>, "a forward method returns what it computed");
    auto given = std::make_tuple(std::move(args)...);
    std::optional<R> result;
    const auto outputs = detail::run_as_forward(*module, tensors_of(given), [&](const Tensors& inputs) {
      assign_tensors(given, inputs);
      result.emplace(std::apply([&](auto&... each) { return ((*module).*method)(each...); }, given));
      return tensors_of(*result);
    });
    assign_tensors(*result, outputs);
    return std::move(*result);
  };
}

}  // namespace tessera
