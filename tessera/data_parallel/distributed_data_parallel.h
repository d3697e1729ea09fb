#pragma once
#include "tessera/data_parallel/detail/replica.h"
#include "tessera/data_parallel/detail/wrapper_module.h"
#include "tessera/nn/holder.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

// Averages the gradients of a module over the ranks of a group; each rank has its own batch. Called like the module
// itself. Its parameters are the module's, with names module.*. See detail/reducer.h for when gradients are reduced.
//
//   FeedForward model(512);
//   DistributedDataParallel ddp(model);                        // or (model, {.device_mesh = mesh["dp"]})
//   optim::AdamW opt(ddp->parameters(), {.lr = 3e-4});
//   torch::mse_loss(ddp(x), y).backward();                     // gradients are averaged when this returns
//   opt.step();
//
// H: a holder (TESSERA_MODULE, TORCH_MODULE) or a std::shared_ptr of a module with a forward.
template <class H>
class DistributedDataParallelImpl : public torch::nn::Module, public data_parallel::WrapperModule {
 public:
  // Wraps a module. All ranks of the group call it.
  explicit DistributedDataParallelImpl(H wrapped, const DDPOptions& options = {})
      : torch::nn::Module("DistributedDataParallel"),
        module(std::move(wrapped)),
        replica_(std::make_shared<data_parallel::Replica>("DistributedDataParallel", *module, options)) {
    register_module("module", module);
  }

  // Calls the wrapped module and prepares the reduction of its gradients.
  template <class... Args>
  auto forward(Args&&... args) {
    replica_->before_forward();
    auto outputs = call(std::forward<Args>(args)...);
    replica_->after_forward(tensors_of(outputs));
    return outputs;
  }

  // auto guard = ddp->no_sync();   gradients are accumulated on this rank while it is alive. Run forward inside it too.
  [[nodiscard]] data_parallel::NoSync no_sync() { return data_parallel::NoSync(replica_); }
  // The same as a setting of the following forward passes.
  void set_requires_gradient_sync(bool sync) { replica_->set_requires_gradient_sync(sync); }

  // Runs `body`, the training loop, on ranks with different numbers of batches (PyTorch: with ddp.join()). A rank whose
  // loop has ended takes part in the reductions of the others, with zeros. At the end all ranks get the parameters and
  // buffers of the last rank; optimizer state is as each rank left it. All ranks call it. If the body of a rank throws,
  // its exception leaves join() at once. In the body every forward with synchronization is a collective; a rank may use
  // no_sync(), and forward passes without gradients, as it likes.
  //   ddp->join([&] { for (auto& batch : batches) train_step(ddp, optimizer, batch); });
  template <std::invocable Body>
  void join(Body&& body, const JoinOptions& options = {}) {
    replica_->join([&] { body(); }, options);
  }

  // Replaces the all-reduce by hook(state, bucket); see data_parallel/comm_hook.h. At most one hook.
  template <class State, class Hook>
  void register_comm_hook(State state, Hook hook) {
    replica_->register_comm_hook(make_comm_hook(std::move(state), std::move(hook)));
  }
  // Calls `step` for each parameter when its gradient is reduced; see ParameterStep.
  void step_in_backward(ParameterStep step) { replica_->step_in_backward(std::move(step)); }

  // The reducer and the group, for inspection.
  const data_parallel::Replica& replica() const { return *replica_; }
  bool averages_in_backward() const override { return true; }  // see detail/averages_in_backward.h

  // The wrapped module.
  H module;

 private:
  template <class... Args>
  auto call(Args&&... args) {
    if constexpr (requires { module(std::forward<Args>(args)...); })
      return module(std::forward<Args>(args)...);
    else
      return module->forward(std::forward<Args>(args)...);
  }

  std::shared_ptr<data_parallel::Replica> replica_;
};

// The holder of DistributedDataParallelImpl.
template <class H>
class DistributedDataParallel : public Holder<DistributedDataParallelImpl<H>> {
 public:
  // Wraps `module`. All ranks of the group call it. The second constructor makes an empty holder.
  explicit DistributedDataParallel(H module, const DDPOptions& options = {})
      : Holder<DistributedDataParallelImpl<H>>(
            std::make_shared<Hooked<DistributedDataParallelImpl<H>>>(std::move(module), options)) {}
  explicit DistributedDataParallel(std::nullptr_t) : Holder<DistributedDataParallelImpl<H>>(nullptr) {}
};

// A parameter that is a DTensor.
struct DistributedParameter {
  std::string name;  // its path in the module
  SpecRef spec;      // its mesh and placements
};
// For PyTorch users: PyTorch requires this call before DistributedDataParallel of a module with DTensor parameters, and
// replaces them by their local tensors. Tessera does not: DDP reduces the local tensors. This function returns the
// DTensor parameters. Throws UsageError if one is on a mesh that this rank is not part of.
std::vector<DistributedParameter> pre_dp_module_transform(const torch::nn::Module& module);

}  // namespace tessera
