#include "tessera/pipelining/detail/pipeline_step.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/saved_tensor_hooks.h"
#include "tessera/pipelining/detail/split_backward.h"
#include "tessera/pipelining/detail/stage_messages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <stdexcept>

namespace tessera::pipelining {
namespace {

using tessera::detail::local_or_self;
using Tensors = std::vector<at::Tensor>;

// What a rank keeps of a microbatch in a stage, from the forward until the gradients of the parameters are computed.
struct KeptMicrobatch {
  at::Tensor input;
  at::Tensor output;  // of the last stage: the loss
  WeightBackward weights;
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Counts the memory that autograd keeps for backward while it is alive, without that of `others`: parameters, the
// batch.
class SavedBytes {
 public:
  explicit SavedBytes(const Tensors& others) {
    for (const at::Tensor& other : others) counted_.insert(storage_of(other));
  }
  int64_t bytes() const { return bytes_; }

 private:
  static const void* storage_of(const at::Tensor& x) { return local_or_self(x).storage().unsafeGetStorageImpl(); }

  std::set<const void*> counted_;
  int64_t bytes_ = 0;
  SavedTensorHooks hooks_{{Accepts::SomeTensors, [this](const at::Tensor& x) -> Unpack {
                             if (counted_.insert(storage_of(x)).second)
                               bytes_ += static_cast<int64_t>(local_or_self(x).storage().nbytes());
                             return {};  // is saved as usual
                           }}};
};

// One step of this rank.
class PipelineStep {
 public:
  PipelineStep(const std::vector<PipelineStage>& stages, const StepOptions& options, const comm::Group& group,
               const at::Tensor& input, const at::Tensor& target)
      : options_(options),
        group_(group),
        stage_ranks_(options.stage_ranks),
        last_stage_(static_cast<int64_t>(options.stage_ranks.size()) - 1),
        messages_(group) {
    for (const PipelineStage& stage : stages) {
      stages_[stage.stage_index()] = &stage;
      if (stage.stage_index() == 0) inputs_ = split(input, "input");
      if (stage.stage_index() == last_stage_ && options.loss_fn) targets_ = split(target, "target");
    }
  }

  StepResult run(const RankActions& actions) {
    for (const std::optional<Action>& action : actions) {
      if (!action) continue;
      for (const Action& part : parts_of(*action))
        named(part, [&] { options_.costs ? perform_and_measure(part) : perform(part); });
    }
    messages_.finish();
    add_shared_gradients();
    return std::move(result_);
  }

 private:
  using Key = std::pair<int64_t, int64_t>;  // stage and microbatch

  // Adds the action to an error. A c10::Error keeps its type.
  template <class F>
  void named(const Action& action, F f) {
    const auto where = [&] {
      return c10::str("in the action ", action, " of rank ", group_->ranks()[group_->rank()],
                      " in the pipeline schedule ", options_.schedule);
    };
    current_ = action;
    try {
      f();
    } catch (c10::Error& error) {
      error.add_context(where());
      throw;
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(c10::str(error.what(), "\n  ", where()));
    }
  }

  Tensors split(const at::Tensor& x, const char* what) const {
    const int64_t rows = x.defined() && x.dim() > 0 ? x.size(0) : 0;
    TESSERA_CHECK(rows >= options_.n_microbatches, UsageError, "the ", what, " of a pipeline step has ", rows,
                  " rows for ", options_.n_microbatches, " microbatches. Write at most as many microbatches as rows");
    return x.tensor_split(options_.n_microbatches);
  }

  // Adds the time of a compute action to the costs of its stage, without the time in which it waits for a message.
  void perform_and_measure(const Action& action) {
    waited_ = 0;
    const auto begin = Clock::now();
    perform(action);
    const double seconds = seconds_since(begin) - waited_;
    StageCost& cost = (*options_.costs)[action.stage];
    if (action.type == ActionType::Forward) cost.forward += seconds;
    if (action.type == ActionType::BackwardInput) cost.backward_input += seconds;
    if (action.type == ActionType::BackwardWeight) cost.backward_weight += seconds;
    if (action.type != ActionType::FullBackward) return;
    cost.backward_input += seconds / 2;
    cost.backward_weight += seconds / 2;
  }

  void perform(const Action& action) {
    const PipelineStage& stage = *stages_.at(action.stage);
    const int64_t microbatch = action.microbatch.value_or(0);
    switch (action.type) {
      case ActionType::Forward:
        return forward(stage, microbatch);
      case ActionType::FullBackward:
        return backward(stage, microbatch);
      case ActionType::BackwardInput:
        return backward_inputs(stage, microbatch);
      case ActionType::BackwardWeight:
        return backward_weights(stage, microbatch);
      case ActionType::SendForward:
        return messages_.send(output_of(action.stage, microbatch), stage_ranks_[action.stage + 1], device_of(stage),
                              action);
      case ActionType::SendBackward: {
        const auto gradient = gradients_.extract({action.stage - 1, microbatch});
        return messages_.send(gradient.mapped(), stage_ranks_[action.stage - 1], device_of(stage), action);
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

  void forward(const PipelineStage& stage, int64_t microbatch) {
    const bool training = static_cast<bool>(options_.loss_fn);
    const at::AutoGradMode grad_mode(training);
    KeptMicrobatch kept;
    kept.input = stage.stage_index() == 0 ? inputs_[microbatch] : output_before(stage, microbatch);
    if (options_.costs) {
      Tensors others = stage.parameters();
      if (stage.stage_index() == 0) others.push_back(kept.input);
      const SavedBytes saved(others);
      kept.output = stage.forward(kept.input);
      (*options_.costs)[stage.stage_index()].activation += static_cast<double>(saved.bytes());
    } else {
      kept.output = stage.forward(kept.input);
    }
    if (stage.stage_index() == last_stage_) {
      Tensors& results = training ? result_.losses : result_.outputs;
      if (training) kept.output = options_.loss_fn(kept.output, targets_[microbatch]);
      results.resize(options_.n_microbatches);
      results[microbatch] = kept.output.detach();
    }
    if (training || stage.stage_index() < last_stage_) kept_[{stage.stage_index(), microbatch}] = std::move(kept);
  }

  // The output of the stage before, as a leaf.
  at::Tensor output_before(const PipelineStage& stage, int64_t microbatch) {
    const int64_t index = stage.stage_index();
    at::Tensor x = stage_ranks_[index - 1] == stage_ranks_[index] ? output_of(index - 1, microbatch)
                                                                  : take(stage, microbatch, /*forward=*/true);
    return x.is_floating_point() && options_.loss_fn ? x.requires_grad_() : x;
  }
  // Backward needs the output once more; without a backward it is freed.
  at::Tensor output_of(int64_t stage, int64_t microbatch) {
    if (options_.loss_fn) return kept_.at({stage, microbatch}).output.detach();
    return kept_.extract({stage, microbatch}).mapped().output;
  }

  at::Tensor take(const PipelineStage& stage, int64_t microbatch, bool forward) {
    const int64_t index = stage.stage_index();
    const auto begin = Clock::now();
    try {
      at::Tensor x = messages_.take({index, microbatch, forward}, stage_ranks_[index + (forward ? -1 : 1)],
                                    device_of(stage), stage.mesh, current_);
      waited_ += seconds_since(begin);
      return x;
    } catch (CommError& error) {
      error.add_context("this rank waited for " +
                        awaited_actions(stage_ranks_, index, microbatch, forward, group_->ranks()));
      throw;
    }
  }

  void backward(const PipelineStage& stage, int64_t microbatch) {
    KeptMicrobatch kept = std::move(kept_.extract({stage.stage_index(), microbatch}).mapped());
    const Tensors gradients = full_backward({kept.output}, {gradient_of_output(stage, kept, microbatch)}, {kept.input});
    if (stage.stage_index() > 0) gradients_[{stage.stage_index() - 1, microbatch}] = gradients[0];
    if (stage.after_backward) stage.after_backward();
  }
  void backward_inputs(const PipelineStage& stage, int64_t microbatch) {
    KeptMicrobatch& kept = kept_.at({stage.stage_index(), microbatch});
    const Tensors gradients = backward_input({kept.output}, {gradient_of_output(stage, kept, microbatch)}, {kept.input},
                                             stage.parameters(), kept.weights);
    if (stage.stage_index() > 0) gradients_[{stage.stage_index() - 1, microbatch}] = gradients[0];
    kept.output = at::Tensor();
    kept.input = at::Tensor();
  }
  at::Tensor gradient_of_output(const PipelineStage& stage, const KeptMicrobatch& kept, int64_t microbatch) {
    const int64_t index = stage.stage_index();
    if (index == last_stage_)
      return at::full_like(kept.output,
                           options_.scale_grads ? 1.0 / static_cast<double>(options_.n_microbatches) : 1.0);
    if (stage_ranks_[index + 1] != stage_ranks_[index]) return take(stage, microbatch, /*forward=*/false);
    return gradients_.extract({index, microbatch}).mapped();
  }

  void backward_weights(const PipelineStage& stage, int64_t microbatch) {
    const auto kept = kept_.extract({stage.stage_index(), microbatch});
    kept.mapped().weights.run();
    if (stage.after_backward) stage.after_backward();
  }

  // Every rank that has a copy of a shared parameter gets the sum of the gradients of all copies, in the order of the
  // ranks, so that the sums are equal bit for bit.
  void add_shared_gradients() {
    if (!options_.loss_fn) return;
    std::set<at::TensorImpl*> done;  // a rank may have several of the stages
    for (const auto& [index, stage] : stages_)
      for (const SharedParameter& shared : stage->shared) {
        if (!shared.parameter.requires_grad() || !done.insert(shared.parameter.unsafeGetTensorImpl()).second) continue;
        std::set<int64_t> ranks;
        for (const int64_t user : shared.stages) ranks.insert(stage_ranks_[user]);
        if (ranks.size() > 1) add_gradients_of(shared.parameter, ranks);
      }
  }
  void add_gradients_of(at::Tensor parameter, const std::set<int64_t>& ranks) {
    const at::NoGradGuard no_grad;
    if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
    at::Tensor gradient = parameter.grad();
    if (is_dtensor(gradient) && is_dtensor(parameter))
      gradient = DTensor(gradient).redistribute(DTensor(parameter).placements());
    const at::Tensor local = (is_dtensor(gradient) ? DTensor(gradient).to_local() : gradient).contiguous();
    std::vector<comm::Work> sends;
    for (const int64_t peer : ranks)
      if (peer != group_->rank()) sends.push_back(group_->send(local, peer));
    at::Tensor sum;
    for (const int64_t peer : ranks) {
      at::Tensor part = local;
      if (peer != group_->rank()) {
        part = at::empty_like(local);
        group_->recv(part, peer).wait();
      }
      sum = sum.defined() ? sum + part : part;
    }
    for (comm::Work& send : sends) send.wait();
    parameter.mutable_grad() = is_dtensor(gradient) ? with_local(DTensor(gradient), sum) : sum;
  }
  static at::Tensor with_local(const DTensor& like, const at::Tensor& local) {
    return DTensor::from_local(local, like.device_mesh(), like.placements(),
                               {.shape = like.sizes().vec(), .stride = like.strides().vec()});
  }

  static at::Device device_of(const PipelineStage& stage) {
    const Tensors parameters = stage.parameters();
    return parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
  }

  const StepOptions& options_;
  const comm::Group& group_;
  const std::vector<int64_t>& stage_ranks_;
  const int64_t last_stage_;
  StageMessages messages_;
  Action current_;
  double waited_ = 0;  // seconds of the present action
  std::map<int64_t, const PipelineStage*> stages_;
  Tensors inputs_;
  Tensors targets_;
  StepResult result_;
  std::map<Key, KeptMicrobatch> kept_;
  std::map<Key, at::Tensor> gradients_;  // of the output of a stage
};

}  // namespace

std::string awaited_actions(const std::vector<int64_t>& stage_ranks, int64_t stage, int64_t microbatch, bool forward,
                            const std::vector<int64_t>& global_ranks) {
  const int64_t last = static_cast<int64_t>(stage_ranks.size()) - 1;
  std::string text;
  const auto add = [&](int64_t from, ActionType type) {
    text += (text.empty() ? "" : ", which needs ") + to_string(Action{from, type, microbatch, {}}) + " of rank " +
            std::to_string(global_ranks[stage_ranks[from]]);
  };
  if (!forward)
    for (int64_t from = stage + 1; from <= last; ++from)
      if (stage_ranks[from] != stage_ranks[from - 1]) add(from, ActionType::SendBackward);
  for (int64_t from = (forward ? stage : last) - 1; from >= 0; --from)
    if (stage_ranks[from] != stage_ranks[from + 1]) add(from, ActionType::SendForward);
  return text;
}

StepResult run_step(const RankActions& actions, const std::vector<PipelineStage>& stages, const comm::Group& group,
                    const StepOptions& options, const at::Tensor& input, const at::Tensor& target) {
  return PipelineStep(stages, options, group, input, target).run(actions);
}

}  // namespace tessera::pipelining
