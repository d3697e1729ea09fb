#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/nn/grad_hooks.h"

#include <vector>

namespace tessera::data_parallel {

// The mean of each gradient by itself, as soon as it is there: nothing for a person, everything for a compiler, which
// groups the collectives as it sees fit (div, tessera::all_reduce, tessera::wait, copy_ for each parameter).
class PerParameterReducer {
 public:
  PerParameterReducer(NamedTensors parameters, comm::Group group);
  ~PerParameterReducer();
  PerParameterReducer(const PerParameterReducer&) = delete;

  void set_sync(bool sync) { sync_ = sync; }
  void add_hook(CommHook hook) { hooks_.push_back(std::move(hook)); }  // each sees a bucket of one gradient

 private:
  void reduce(size_t i);

  NamedTensors parameters_;
  comm::Group group_;
  bool sync_ = true;
  std::vector<CommHook> hooks_;
  std::vector<GradHookHandle> handles_;
};

}  // namespace tessera::data_parallel
