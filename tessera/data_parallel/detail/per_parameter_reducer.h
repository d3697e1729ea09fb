#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/nn/grad_hooks.h"

#include <memory>
#include <vector>

namespace tessera::data_parallel {

// All-reduces each gradient separately when it is ready (PyTorch: optimize_ddp = "python_reducer"). The ops (div,
// tessera::all_reduce, tessera::wait, copy_ for each parameter) are meant for a compiler that fuses the collectives.
class PerParameterReducer : public std::enable_shared_from_this<PerParameterReducer> {
 public:
  // Registers hooks on the parameters, which refer to the reducer weakly.
  static std::shared_ptr<PerParameterReducer> make(NamedTensors parameters, comm::Group group);
  ~PerParameterReducer();
  PerParameterReducer(const PerParameterReducer&) = delete;

  void set_sync(bool sync) { sync_ = sync; }
  void add_hook(CommHook hook) { hooks_.push_back(std::move(hook)); }  // each gets buckets of one gradient

 private:
  PerParameterReducer(NamedTensors parameters, comm::Group group)
      : parameters_(std::move(parameters)), group_(std::move(group)) {}
  void reduce(size_t i);

  NamedTensors parameters_;
  comm::Group group_;
  bool sync_ = true;
  std::vector<CommHook> hooks_;
  std::vector<GradHookHandle> handles_;
};

}  // namespace tessera::data_parallel
