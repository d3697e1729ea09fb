#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/detail/buckets.h"
#include "tessera/data_parallel/detail/join.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/data_parallel/detail/requires_grad_agreement.h"
#include "tessera/data_parallel/detail/stopped_ranks.h"
#include "tessera/nn/grad_hooks.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

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
  std::vector<at::Tensor> sparse = {};  // parameters with sparse gradients
};

// Averages gradients over the ranks of a group while backward computes the remaining ones (PyTorch: Reducer).
//
//   gradient of p is ready          it is copied into its bucket, times 1/ranks
//   a bucket has all gradients      its all-reduce starts, after those of earlier buckets, and overlaps with backward
//   end of backward                 waits for the buckets in order and copies the results to p.grad
//
// A sparse gradient is in no bucket: the end of backward all-gathers its indices and values. Comm hooks do not get it.
//
// In a group of one rank without a comm hook, gradients stay where autograd put them: buckets have no memory.
//
// It consists of registered ops (mul.out, tessera::all_reduce_, tessera::wait, copy_), so a tracer records it.
// A backward reduces the current .grad, so gradients that were accumulated under no_sync() are reduced by the next one.
//
// Parameters may be frozen and unfrozen at any time, on all ranks. Buckets have the parameters that required a gradient
// in the last forward with synchronization. A frozen parameter stays in its bucket until its gradients of passes under
// no_sync() are reduced. Each bucket's collective carries a hash of what is frozen, so ranks that differ get an error.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // Registers hooks on the parameters, which refer to the reducer weakly. Outputs of forward keep the reducer alive.
  // Requires: every rank has the same parameters in the same order; each is a leaf.
  static std::shared_ptr<Reducer> make(NamedTensors parameters, comm::Group group, ReducerOptions options);
  ~Reducer();
  Reducer(const Reducer&) = delete;

  // Before a forward. `sync`: whether the following backward passes reduce. Makes new buckets if parameters were frozen
  // or unfrozen. Rebuilds the buckets once, in the order in which gradients became ready in the first pass.
  void before_forward(bool sync);
  // After a forward.
  void after_forward(const Tensors& outputs);

  // Ranks with different numbers of batches. While `join` is not null, each reduction is announced to it.
  void set_join(Join* join);
  // Of a rank that has joined: takes part in one backward of the other ranks, with zeros, and keeps all gradients.
  void shadow_backward();

  void set_hook(CommHook hook);                                   // replaces the all-reduce
  void set_step(ParameterStep step) { step_ = std::move(step); }  // called after each bucket

  const NamedTensors& parameters() const { return parameters_; }
  const Buckets& buckets() const { return plan_; }  // the current ones; indices of parameters()
  bool rebuilt() const { return rebuilt_; }
  int64_t passes() const { return passes_; }  // backward passes so far, with or without reduction

 private:
  struct BucketState {
    at::Tensor flat;
    Tensors views;       // of the parameters' gradients, in their shapes
    size_t pending = 0;  // gradients that are not ready
    BucketResult result;
    std::string label;
  };
  struct BucketSlot {
    size_t bucket = 0, slot = 0;
  };
  struct ParameterState {
    bool in_bucket = false;
    bool sparse = false;            // its gradient is in no bucket
    bool ready = false;             // in this pass
    bool used = false;              // it has a gradient to reduce
    bool unsynced = false;          // .grad has gradients that are not reduced yet
    bool trained_unsynced = false;  // required a gradient in a forward without sync since the last reduction
    int calls = 0;                  // of its hook in this pass
    int expected = 1;               // calls until it is ready; static_graph records it in the first pass. 0: never used
  };

  Reducer(NamedTensors parameters, comm::Group group, ReducerOptions options);
  bool is_alone() const { return group_->size() == 1 && !hook_; }
  bool is_reduced(size_t i) const;
  bool belongs_in_bucket(size_t i) const { return !states_[i].sparse && is_reduced(i); }
  void make_first_buckets();
  void start_reduction();
  void reduce_sparse(const std::vector<bool>& used);
  void gradient_accumulated(size_t i);
  void begin_pass();
  void abandon();
  void mark_ready(size_t i);
  void copy_to_bucket(size_t i);
  void start_ready_buckets();
  void start_bucket(BucketState& bucket);
  [[noreturn]] void fail_in(size_t bucket, const CommError& error);
  void finish_pass();
  void handle_missing_gradients();
  void record_static_graph();
  void copy_from_bucket(size_t i);
  void make_buckets(Buckets plan);
  void rebuild();
  std::vector<bool> used_on_any_rank();
  void step_bucket(const Bucket& bucket, const std::vector<bool>& used);
  at::Tensor& view_of(size_t i) { return buckets_[slots_[i].bucket].views[slots_[i].slot]; }
  bool is_recording_graph() const { return options_.static_graph && !graph_recorded_; }
  bool finds_unused() const { return options_.find_unused_parameters && !options_.static_graph; }
  bool has_unreduced_gradient(size_t i) const;
  std::vector<BucketItem> items() const;
  std::vector<size_t> in_buckets() const;  // the parameters that are in a bucket
  std::vector<std::string> names(const std::vector<size_t>& which) const;
  int64_t pass_number() const { return options_.uneven_accumulation ? reduced_passes_ : passes_; }
  double scale() const;

  NamedTensors parameters_;
  comm::Group group_;
  ReducerOptions options_;
  StoppedRanks stopped_ranks_;
  CommHook hook_;
  ParameterStep step_;
  at::Tensor scale_;  // 1/ranks; in a join what it says
  Join* join_ = nullptr;
  bool has_sparse_ = false;
  std::vector<GradHookHandle> handles_;

  Buckets plan_;
  std::vector<BucketState> buckets_;
  std::vector<BucketSlot> slots_;
  std::vector<ParameterState> states_;
  size_t num_in_buckets_ = 0;

  bool sync_ = true;
  bool in_pass_ = false;
  int graph_task_ = -1;        // id of the current backward
  size_t num_started_ = 0;     // buckets whose collective has started
  std::vector<size_t> order_;  // in which gradients became ready in the first reduced pass
  int64_t passes_ = 0, reduced_passes_ = 0, unreduced_passes_ = 0;  // unreduced: since the last reduction
  RequiresGradHash frozen_;                                         // of the current pass
  bool any_frozen_ = false;                                         // in a bucket, in the current pass
  bool rebuilt_ = false, graph_recorded_ = false;
};

}  // namespace tessera::data_parallel
