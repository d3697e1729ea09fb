#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/fsdp/detail/engine/buffer_pool.h"
#include "tessera/data_parallel/fsdp/detail/engine/fsdp_streams.h"
#include "tessera/data_parallel/fsdp/detail/engine/param_group_gradients.h"
#include "tessera/data_parallel/fsdp/detail/engine/shard_layout.h"
#include "tessera/nn/saved_tensor_hooks.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::data_parallel::fsdp {

// One parameter of a group (PyTorch: FSDPParam).
struct FSDPParam {
  std::string name;
  at::Tensor tensor;            // the object that modules and optimizers hold
  SpecRef unsharded_spec = {};  // unsharded form: a DTensor over other axes (tensor parallel); null: a plain tensor
  SpecRef sharded_spec = {};    // sharded form: a DTensor; null: a plain 1-D tensor (flat layout)
};

struct ParamGroupOptions {
  std::optional<c10::ScalarType> param_dtype = {};   // dtype of unsharded parameters; none: the shard's dtype
  std::optional<c10::ScalarType> reduce_dtype = {};  // dtype of the reduce-scatter; none: the unsharded dtype
  bool flat_parameter = false;                       // .grad is set on the flat parameter, not on each parameter
  bool keep_low_precision_grads = false;             // reduced gradients keep the dtype of the reduction
  bool offload = false;    // shard and gradient are on the CPU; unsharded parameters never share their memory
  bool pin_memory = true;  // with offload and a GPU: the shard is pinned, and copies of it do not block the host
};

// Wraps this rank's local tensor of an unsharded parameter (or of its gradient or optimizer state) as a DTensor with
// unsharded_spec. Returns `local` if the parameter has no such spec.
at::Tensor wrap_unsharded(const FSDPParam& param, const at::Tensor& local);

// Notifications that a group sends during backward. The schedule implements them.
class BackwardEvents {
 public:
  virtual ~BackwardEvents() = default;
  // Backward is about to compute a gradient of the group, or (needs_values) reads a saved unsharded parameter.
  virtual void before_backward(ParamGroup& group, bool needs_values) = 0;
  // All gradients that this backward computes for the group are ready.
  virtual void gradients_ready(ParamGroup& group) = 0;
};

// One group of parameters that are all-gathered, used and resharded together (PyTorch: FSDPParamGroup).
// States:  sharded -> unsharding (all-gather in flight) -> unsharded -> sharded
// Gradients are reduce-scattered when the last one of the group is ready (param_group_gradients.h).
//
// A parameter is one tensor object in modules and optimizers, with two forms. set_data() switches between them, so
// versions, hooks and references stay valid:
//
//   sharded     this rank's shard. Per-parameter layout: a DTensor of the global shape. Flat layout: a 1-D tensor
//   unsharded   a view of the all-gather output. A DTensor over "tp" if the parameter is also sharded over "tp"
//
// What autograd saves of an unsharded parameter is packed as (group, offset, strides) and unpacked when backward needs
// it, so the buffer can be freed between forward and backward. A group has no modules: the schedule calls it.
class ParamGroup : public std::enable_shared_from_this<ParamGroup> {
 public:
  // Copies this rank's shard of each parameter and switches the parameters to the sharded form.
  // Ranks of `shard_group` have different shards. Ranks of `replicate_group` have equal shards (null: no replicas).
  // Parameters on the meta device (deferred_init) become meta shards.
  // A group without parameters does nothing: the root of a tree whose parameters all belong to inner groups.
  ParamGroup(std::string name, std::vector<FSDPParam> params, ShardLayout layout, comm::Group shard_group,
             comm::Group replicate_group, ParamGroupOptions options);
  ~ParamGroup();
  ParamGroup(const ParamGroup&) = delete;

  const std::string& name() const { return name_; }
  int32_t index() const { return index_; }  // in the schedule's list of groups
  const std::vector<FSDPParam>& params() const { return params_; }
  const ShardLayout& layout() const { return layout_; }
  // This rank's shard of all parameters, one 1-D leaf. Its .grad has the reduced gradients.
  const at::Tensor& flat_param() const { return flat_param_; }
  const comm::Group& shard_group() const { return shard_group_; }
  const comm::Group& replicate_group() const { return replicate_group_; }
  const ParamGroupOptions& options() const { return options_; }
  c10::Device device() const { return device_; }  // the compute device
  const FSDPStreams& streams() const { return streams_; }
  void set_custom_all_gather(std::shared_ptr<AllGather> custom) { custom_all_gather_ = std::move(custom); }
  ParamGroupGradients& gradients() { return *gradients_; }
  const ParamGroupGradients& gradients() const { return *gradients_; }

  // What the schedule of a module tree gives to each of its groups.
  struct ScheduleContext {
    std::string name;   // path of the module, used to label collectives
    int32_t index = 0;  // in the schedule's list of groups
    FSDPStreams streams = {};
    std::shared_ptr<BufferPool> buffer_pool = {};
    std::weak_ptr<BackwardEvents> events = {};  // weak: tensors that autograd saved may outlive the modules
  };
  void attach_to_schedule(ScheduleContext context);
  void notify_before_backward(bool needs_values);
  void notify_gradients_ready();

  // True: the next unshard() uses the shard's dtype and ignores param_dtype. Requires: no unsharded buffer.
  void set_full_precision(bool full) { full_precision_ = full; }
  void unshard();              // starts the all-gather, unless the buffer exists
  void wait_for_unshard();     // unshard() if necessary; parameters are unsharded on return
  void reshard();              // parameters are sharded; frees the buffer
  void reshard_keep_buffer();  // parameters are sharded; the next unshard reuses the buffer unless the shard changes
  // reshard(), but keeps 1/n of the unsharded parameters on this rank. The next unshard() then communicates only with
  // the n ranks of `reshard_group`, unless the shard changes first. Not for flat layouts.
  void reshard_to(const comm::Group& reshard_group);
  // Before reshard(): accepts in-place writes to unsharded parameters. With writeback this rank's changed elements are
  // copied to the shard. Without writeback they are discarded.
  void accept_writes(bool writeback);
  bool is_unsharded() const { return unsharded_; }
  // Unsharded parameters are views of the shard: no all-gather, no cast, no device copy.
  bool unsharded_aliases_shard() const;
  bool has_unsharded_buffer() const { return all_gather_output_.defined(); }
  // True if the unsharded buffer can be compared with the shard: it is a complete copy.
  bool has_copy_of_shard() const { return all_gather_done_ && !params_.empty() && !unsharded_aliases_shard(); }
  // An int tensor of one element: 1 if this rank's shard is not what it was when the buffer was all-gathered, however
  // it was written to. Version counters do not count writes through .data() or an earlier to_local(). Requires:
  // has_copy_of_shard().
  at::Tensor shard_differs_from_buffer() const;
  void free_stale_buffer() {  // if version counters tell that the shard was written to
    if (is_stale()) free_buffer();
  }
  void forget_reshard_shard() { reshard_shard_.reset(); }  // see reshard_to()
  // Dtype of the gradient reduction.
  c10::ScalarType reduce_dtype() const { return options_.reduce_dtype.value_or(unsharded_dtype()); }
  // True if parameters got new storage since the last unshard (materialize, set_data, another dtype).
  bool has_new_values() const;
  bool take_new_values();  // copies new values to the shard; returns whether there were any
  void abandon();          // after an error: parameters are sharded, no collective is in flight, .grad is as before

  // Accepts what autograd saves of unsharded parameters.
  const PackerRef& packer() const { return packer_; }
  // Parameter i in its sharded form, as a view of a buffer that is laid out like flat_param().
  at::Tensor sharded_view(size_t i, const at::Tensor& shard) const;

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  void shard_parameters();
  void copy_values_to_shard();
  void wait_for_all_gather();
  void finish_all_gather();
  void copy_from_custom_output();
  void follow_flat_param();
  void switch_to_unsharded(size_t i, const at::Tensor& unsharded);
  void make_sharded_params();
  bool pins_shard() const;
  at::Tensor new_shard(const at::TensorOptions& options) const;
  void switch_to_sharded();
  void free_buffer();
  c10::ScalarType unsharded_dtype() const;
  Unpack pack(const at::Tensor& saved);
  int64_t version() const;  // changes when a parameter or the shard is written to
  bool is_stale() const { return has_unsharded_buffer() && !unsharded_ && all_gather_version_ != version(); }
  const ShardLayout& all_gather_layout() const {
    return reshard_group_ && all_gather_group_ == reshard_group_ ? *reshard_layout_ : layout_;
  }

  std::string name_;
  int32_t index_ = 0;
  std::shared_ptr<BufferPool> buffer_pool_;
  std::weak_ptr<BackwardEvents> events_;
  FSDPStreams streams_;
  std::vector<FSDPParam> params_;
  ShardLayout layout_;
  comm::Group shard_group_, replicate_group_;
  ParamGroupOptions options_;
  at::Tensor flat_param_;
  std::vector<at::Tensor> sharded_params_;  // the parameters in the sharded form, views of flat_param_
  c10::Device device_ = at::kCPU;
  PackerRef packer_;

  at::Tensor all_gather_input_, all_gather_output_, staging_;
  std::shared_ptr<AllGather> custom_all_gather_;  // may be null
  comm::Work custom_work_;                        // of the custom all-gather in flight
  at::Tensor custom_output_;                      // the shards of all ranks, one after the other
  comm::Group all_gather_group_;                  // shard_group_ or reshard_group_
  int64_t all_gather_version_ = 0;
  bool all_gather_done_ = false;
  bool unsharded_ = false;
  bool full_precision_ = false;
  std::vector<uint32_t> unsharded_versions_;  // of the parameters, when they were unsharded
  std::vector<Accumulator> accumulators_;     // of parameters whose unsharded dtype or device is not the shard's

  // Kept by reshard_to().
  comm::Group reshard_group_;
  std::optional<ShardLayout> reshard_layout_;
  at::Tensor reshard_shard_;
  int64_t reshard_version_ = 0;

  std::unique_ptr<ParamGroupGradients> gradients_;
};

// Waits for the collective that writes `x`, ignores its error, and frees `x`. For cleanup after an error.
void discard(at::Tensor& x, const comm::Group& group);

}  // namespace tessera::data_parallel::fsdp
