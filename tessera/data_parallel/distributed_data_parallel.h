#pragma once
#include "tessera/data_parallel/detail/replica.h"
#include "tessera/nn/holder.h"

#include <memory>
#include <type_traits>
#include <utility>

namespace tessera {

// A module whose gradients are the means over the ranks of a group, each rank having its own batch. Called like the
// module itself; its parameters are the module's, named module.*. See data_parallel/reducer.h for what happens when.
//
//   FeedForward model(512);
//   DistributedDataParallel ddp(model);                        // or (model, {.device_mesh = mesh["dp"]})
//   optim::AdamW opt(ddp->parameters(), {.lr = 3e-4});
//   torch::mse_loss(ddp(x), y).backward();                     // gradients are means when this returns
//   opt.step();
//
// H: a holder (TESSERA_MODULE, TORCH_MODULE) or a std::shared_ptr of a module with a forward.
template <class H>
class DistributedDataParallelImpl : public torch::nn::Module {
 public:
  explicit DistributedDataParallelImpl(H wrapped, const DDPOptions& options = {})
      : torch::nn::Module("DistributedDataParallel"),
        module(std::move(wrapped)),
        replica_(std::make_shared<data_parallel::Replica>("DistributedDataParallel",
                                                          data_parallel::parameters_of(*module),
                                                          data_parallel::buffers_of(*module), options)) {
    register_module("module", module);
  }

  template <class... Args>
  auto forward(Args&&... args) {
    replica_->before_forward();
    auto outputs = call(std::forward<Args>(args)...);
    replica_->after_forward(tensors_of(outputs));
    return outputs;
  }

  // auto guard = ddp->no_sync();   while alive, gradients are accumulated on this rank only. The forward belongs
  // inside.
  [[nodiscard]] data_parallel::NoSync no_sync() { return data_parallel::NoSync(*replica_); }
  void set_requires_gradient_sync(bool sync) { replica_->set_requires_gradient_sync(sync); }

  // hook(state, bucket); see data_parallel/comm_hook.h. At most one.
  template <class State, class Hook>
  void register_comm_hook(State state, Hook hook) {
    replica_->register_comm_hook(make_comm_hook(std::move(state), std::move(hook)));
  }
  void step_in_backward(ParameterStep step) { replica_->step_in_backward(std::move(step)); }

  const data_parallel::Replica& replica() const { return *replica_; }

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

template <class H>
class DistributedDataParallel : public Holder<DistributedDataParallelImpl<H>> {
 public:
  explicit DistributedDataParallel(H module, const DDPOptions& options = {})
      : Holder<DistributedDataParallelImpl<H>>(
            std::make_shared<Hooked<DistributedDataParallelImpl<H>>>(std::move(module), options)) {}
  explicit DistributedDataParallel(std::nullptr_t) : Holder<DistributedDataParallelImpl<H>>(nullptr) {}
};

}  // namespace tessera
