#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/detail/buckets.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/detail/stopped_ranks.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/nn/grad_hooks.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

// Means of gradients over the ranks of a group, while backward is still computing the rest of them.
//
//   gradient of p accumulated   ->  copied into its place in a bucket, times 1/ranks
//   bucket full, and all before it posted  ->  one all_reduce for it, under way while backward goes on
//   end of backward             ->  waited for in order, copied back into p.grad
//
// All of it is made of registered ops (mul.out, tessera::all_reduce_, tessera::wait, copy_): a tracer sees it.
// A backward reduces whatever .grad then holds, so gradients accumulated without a reduction come along in the next.
namespace tessera {
struct CommError;
}

namespace tessera::data_parallel {

struct ReducerOptions {
  BucketLimits limits = {};
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;
  bool uneven_accumulation = false;
};

class Reducer {
 public:
  // Requires: the same parameters, in the same order, on every rank; each a leaf that requires a gradient.
  Reducer(NamedTensors parameters, comm::Group group, ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;

  // Before a forward: `sync` says whether the backward passes that follow reduce. Rebuilds the buckets once, in the
  // order in which the first pass saw gradients come.
  void before_forward(bool sync);
  // After a forward. Needed with static_graph only, where a backward may be run inside of the backward.
  void after_forward(const Tensors& outputs);

  void set_hook(CommHook hook);                                   // instead of the mean
  void set_step(ParameterStep step) { step_ = std::move(step); }  // after each bucket

  const NamedTensors& parameters() const { return parameters_; }
  const Buckets& buckets() const { return plan_; }  // as they are now, by index of parameter
  bool rebuilt() const { return rebuilt_; }
  int64_t passes() const { return passes_; }  // backward passes so far, reduced or not

 private:
  struct BucketState {
    at::Tensor flat;
    Tensors views;       // a parameter's place, in its shape
    size_t missing = 0;  // gradients that have not come
    BucketResult result;
    std::string label;
  };
  struct Place {
    size_t bucket = 0, slot = 0;
  };
  // What one parameter went through.
  struct State {
    bool ready = false;     // in this pass
    bool used = false;      // there is a gradient to reduce
    bool unsynced = false;  // .grad holds something that was not reduced yet
    int calls = 0;          // of its hook, in this pass
    int expected = 1;       // calls until it is ready; static_graph learns it, 0: never used
  };

  void gradient_accumulated(size_t i);
  void begin_pass();
  void abandon();
  void mark(size_t i);
  void fill(size_t i);
  void post_full_buckets();
  void post_bucket(BucketState& bucket);
  [[noreturn]] void fail_in(size_t bucket, const CommError& error);
  void finish_pass();
  void resolve_missing();
  void learn_graph();
  void write_back(size_t i);
  void make_buckets(Buckets plan);
  void rebuild();
  std::vector<bool> used_somewhere();
  void step_bucket(const Bucket& bucket, const std::vector<bool>& used);
  at::Tensor& view_of(size_t i) { return buckets_[places_[i].bucket].views[places_[i].slot]; }
  bool learning() const { return options_.static_graph && !learned_; }
  bool guessing() const { return options_.find_unused_parameters && !options_.static_graph; }  // what a pass will use
  std::vector<BucketItem> items() const;
  std::vector<std::string> names(const std::vector<size_t>& which) const;
  int64_t number() const { return options_.uneven_accumulation ? reduced_passes_ : passes_; }

  NamedTensors parameters_;
  comm::Group group_;
  ReducerOptions options_;
  Departures departures_;
  CommHook hook_;
  ParameterStep step_;
  at::Tensor scale_;  // 1/ranks
  std::vector<GradHookHandle> handles_;

  Buckets plan_;
  std::vector<BucketState> buckets_;
  std::vector<Place> places_;
  std::vector<State> states_;

  bool sync_ = true;
  bool in_pass_ = false;
  int task_ = -1;              // the backward of the current pass
  size_t posted_ = 0;          // buckets under way
  std::vector<size_t> order_;  // in which gradients came, in the first reduced pass
  int64_t passes_ = 0, reduced_passes_ = 0;
  bool rebuilt_ = false, learned_ = false;
};

}  // namespace tessera::data_parallel
