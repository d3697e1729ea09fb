#include "tessera/pipelining/detail/pipeline_run.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <deque>
#include <map>

#include "tessera/base/error.h"
#include "tessera/pipelining/detail/lowering.h"
#include "tessera/pipelining/detail/split_backward.h"

namespace tessera::pipelining {
namespace {

using Tensors = std::vector<at::Tensor>;

// What a rank keeps of a microbatch in a stage, from the forward until the gradients of the parameters are computed.
struct KeptMicrobatch {
  at::Tensor input;
  at::Tensor output;  // of the last stage: the loss
  WeightBackward weights;
};

// A tensor travels behind a header: dtype, number of dims, sizes. So microbatches may differ in size.
constexpr int64_t kHeader = 16;

at::Tensor header_of(const at::Tensor& x) {
  TESSERA_CHECK(x.dim() <= kHeader - 2, UsageError, "an output of a pipeline stage has ", x.dim(), " dims. At most ",
                kHeader - 2, " can be sent");
  std::vector<int64_t> numbers(kHeader, 0);
  numbers[0] = static_cast<int64_t>(x.scalar_type());
  numbers[1] = x.dim();
  std::ranges::copy(x.sizes(), numbers.begin() + 2);
  return at::tensor(numbers);
}

// The output of the stage before, or the gradient from the stage behind, for a microbatch of `stage`.
struct MessageKey {
  int64_t stage = 0;
  int64_t microbatch = 0;
  bool forward = true;
  auto operator<=>(const MessageKey&) const = default;
};

// Messages between neighbouring stages. Sends return at once; their tensors live until the end of the step. Two ranks
// exchange messages in one order, that of the schedule: before a message come all that were announced before it.
class StageMessages {
 public:
  explicit StageMessages(comm::Group group) : group_(std::move(group)) {}

  void send(const at::Tensor& x, int64_t to) {
    post(header_of(x), to);
    post(x.contiguous(), to);
  }
  // A RECV of the schedule.
  void announce(const MessageKey& key, int64_t from) { announced_[from].push_back(key); }
  // Waits for an announced message.
  at::Tensor take(const MessageKey& key, int64_t from, const at::Device& device) {
    while (!arrived_.contains(key)) {
      std::deque<MessageKey>& queue = announced_[from];
      TESSERA_CHECK(!queue.empty(), InternalError, "a message of rank ", from, " is used before its RECV");
      arrived_[queue.front()] = recv(from, device);
      queue.pop_front();
    }
    return arrived_.extract(key).mapped();
  }
  void finish() {
    for (auto& [x, work] : sent_) work.wait();
    sent_.clear();
  }

 private:
  void post(at::Tensor x, int64_t to) {
    comm::Work work = group_->send(x, to);
    sent_.emplace_back(std::move(x), std::move(work));
  }
  at::Tensor recv(int64_t from, const at::Device& device) {
    at::Tensor header = at::empty({kHeader}, at::kLong);
    group_->recv(header, from).wait();
    const int64_t* numbers = header.const_data_ptr<int64_t>();
    at::Tensor x = at::empty(at::IntArrayRef(numbers + 2, numbers[1]),
                             at::TensorOptions(static_cast<at::ScalarType>(numbers[0])).device(device));
    group_->recv(x, from).wait();
    return x;
  }

  comm::Group group_;
  std::deque<std::pair<at::Tensor, comm::Work>> sent_;
  std::map<int64_t, std::deque<MessageKey>> announced_;  // by peer
  std::map<MessageKey, at::Tensor> arrived_;
};

// One step of this rank.
class PipelineStep {
 public:
  PipelineStep(const std::vector<StageModule>& stages, const PipelineOptions& options, const comm::Group& group,
               const std::vector<int64_t>& stage_ranks, const at::Tensor& input, const at::Tensor& target)
      : options_(options),
        stage_ranks_(stage_ranks),
        last_stage_(static_cast<int64_t>(stage_ranks.size()) - 1),
        messages_(group) {
    for (const StageModule& stage : stages) {
      stages_[stage.stage] = &stage;
      if (stage.stage == 0) inputs_ = split(input, "input");
      if (stage.stage == last_stage_) targets_ = split(target, "target");
    }
  }

  Tensors run(const RankActions& actions) {
    for (const std::optional<Action>& action : actions) {
      if (!action) continue;
      for (const Action& part : parts_of(*action)) {
        try {
          perform(part);
        } catch (const c10::Error& error) {
          c10::Error named = error;
          named.add_context(c10::str("in the action ", part, " of the pipeline schedule ", options_.schedule));
          throw named;
        }
      }
    }
    messages_.finish();
    return std::move(losses_);
  }

 private:
  Tensors split(const at::Tensor& x, const char* what) const {
    TESSERA_CHECK(x.defined() && x.dim() > 0 && x.size(0) >= options_.microbatches, UsageError, "the ", what,
                  " of a pipeline step has ", x.defined() && x.dim() > 0 ? x.size(0) : 0, " rows for ",
                  options_.microbatches, " microbatches. Write at most as many microbatches as rows");
    return x.tensor_split(options_.microbatches);
  }

  void perform(const Action& action) {
    const StageModule& stage = *stages_.at(action.stage);
    const int64_t microbatch = action.microbatch.value_or(0);
    switch (action.type) {
      case ActionType::Forward:
        return forward(stage, microbatch);
      case ActionType::FullBackward:
        backward_inputs(stage, microbatch);
        return backward_weights(stage, microbatch);
      case ActionType::BackwardInput:
        return backward_inputs(stage, microbatch);
      case ActionType::BackwardWeight:
        return backward_weights(stage, microbatch);
      case ActionType::SendForward:
        return messages_.send(kept_.at({action.stage, microbatch}).output.detach(), stage_ranks_[action.stage + 1]);
      case ActionType::SendBackward: {
        const auto gradient = gradients_.extract({action.stage - 1, microbatch});
        return messages_.send(gradient.mapped(), stage_ranks_[action.stage - 1]);
      }
      case ActionType::RecvForward:
        return messages_.announce({action.stage, microbatch, true}, stage_ranks_[action.stage - 1]);
      case ActionType::RecvBackward:
        return messages_.announce({action.stage, microbatch, false}, stage_ranks_[action.stage + 1]);
      case ActionType::Unshard:
        return stage.unshard ? stage.unshard() : void();
      case ActionType::Reshard:
        return stage.reshard ? stage.reshard() : void();
      case ActionType::ReduceGrad:
        return stage.reduce_grad ? stage.reduce_grad() : void();
      case ActionType::OverlapForwardBackward:
        return;  // its parts are performed
    }
  }

  void forward(const StageModule& stage, int64_t microbatch) {
    const at::AutoGradMode enable(true);
    KeptMicrobatch kept;
    kept.input = stage.stage == 0 ? inputs_[microbatch] : output_before(stage, microbatch);
    kept.output = stage.forward(kept.input);
    if (stage.stage == last_stage_) {
      kept.output = options_.loss(kept.output, targets_[microbatch]);
      losses_.resize(options_.microbatches);
      losses_[microbatch] = kept.output.detach();
    }
    kept_[{stage.stage, microbatch}] = std::move(kept);
  }

  // The output of the stage before, as a leaf.
  at::Tensor output_before(const StageModule& stage, int64_t microbatch) {
    const int64_t from = stage_ranks_[stage.stage - 1];
    at::Tensor x = from == stage_ranks_[stage.stage]
                       ? kept_.at({stage.stage - 1, microbatch}).output.detach()
                       : messages_.take({stage.stage, microbatch, true}, from, device_of(stage));
    return x.is_floating_point() ? x.requires_grad_() : x;
  }

  void backward_inputs(const StageModule& stage, int64_t microbatch) {
    KeptMicrobatch& kept = kept_.at({stage.stage, microbatch});
    const Tensors gradients = backward_input({kept.output}, {gradient_of_output(stage, kept, microbatch)}, {kept.input},
                                             stage.parameters, kept.weights);
    if (stage.stage > 0) gradients_[{stage.stage - 1, microbatch}] = gradients[0];
    kept.output = at::Tensor();
    kept.input = at::Tensor();
  }
  at::Tensor gradient_of_output(const StageModule& stage, const KeptMicrobatch& kept, int64_t microbatch) {
    if (stage.stage == last_stage_)  // of the mean over microbatches
      return at::full_like(kept.output, 1.0 / static_cast<double>(options_.microbatches));
    const int64_t from = stage_ranks_[stage.stage + 1];
    if (from != stage_ranks_[stage.stage])
      return messages_.take({stage.stage, microbatch, false}, from, device_of(stage));
    return gradients_.extract({stage.stage, microbatch}).mapped();
  }

  void backward_weights(const StageModule& stage, int64_t microbatch) {
    const auto kept = kept_.extract({stage.stage, microbatch});
    kept.mapped().weights.run();
  }

  static at::Device device_of(const StageModule& stage) {
    return stage.parameters.empty() ? at::Device(at::kCPU) : stage.parameters[0].device();
  }

  using Key = std::pair<int64_t, int64_t>;  // stage and microbatch
  const PipelineOptions& options_;
  const std::vector<int64_t>& stage_ranks_;
  const int64_t last_stage_;
  StageMessages messages_;
  std::map<int64_t, const StageModule*> stages_;
  Tensors inputs_;
  Tensors targets_;
  Tensors losses_;
  std::map<Key, KeptMicrobatch> kept_;
  std::map<Key, at::Tensor> gradients_;  // of the output of a stage
};

}  // namespace

PipelineRun::PipelineRun(std::vector<StageModule> stages, PipelineOptions options, const GroupRef& group)
    : stages_(std::move(stages)), options_(std::move(options)), group_(group.group()) {
  const PipelineShape shape{group_->size(), static_cast<int64_t>(stages_.size()), options_.microbatches};
  const ActionTable compute = compute_schedule(options_.schedule, shape);
  stage_ranks_ = stage_ranks(options_.schedule, shape);
  table_ = lower_schedule(compute, stage_ranks_, shape.microbatches);
  std::ranges::sort(stages_, {}, &StageModule::stage);
  size_t next = 0;
  for (int64_t stage = 0; stage < shape.stages(); ++stage) {
    if (stage_ranks_[stage] != group_->rank()) continue;
    TESSERA_CHECK(stages_[next].stage == stage, UsageError, options_.schedule, " on ", shape.ranks, " ranks with ",
                  shape.stages_per_rank, " stages each gives stage ", stage, " to rank ", group_->rank(),
                  ", which was given stage ", stages_[next].stage, ". stage_ranks() lists the rank of each stage");
    ++next;
  }
}

std::vector<at::Tensor> PipelineRun::step(const at::Tensor& input, const at::Tensor& target) {
  PipelineStep step(stages_, options_, group_, stage_ranks_, input, target);
  return step.run(table_[group_->rank()]);
}

}  // namespace tessera::pipelining
