#include "tessera/pipelining/schedule.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/detail/averages_in_backward.h"
#include "tessera/pipelining/detail/check_table.h"
#include "tessera/pipelining/detail/lowering.h"
#include "tessera/pipelining/detail/pipeline_step.h"
#include "tessera/pipelining/detail/schedules.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <functional>

namespace tessera::pipelining {

struct PipelineSchedule::Plan {
  ActionTable actions;          // of a step, with communication
  ActionTable forward_actions;  // of eval(), with communication
  std::vector<int64_t> stage_ranks;
};

namespace {

ActionTable forward_only(const ActionTable& compute) {
  ActionTable table(compute.size());
  for (size_t rank = 0; rank < compute.size(); ++rank)
    for (const std::optional<Action>& entry : compute[rank]) {
      if (!entry) continue;
      for (const Action& action : parts_of(*entry))
        if (action.type == ActionType::Forward) table[rank].emplace_back(action);
    }
  return table;
}

// What all ranks must agree on. Each has a name for the message.
struct ScheduleFact {
  const char* name;
  int64_t value;
};

void check_ranks_agree(const std::vector<ScheduleFact>& facts, const comm::Group& group, const at::Device& device) {
  std::vector<int64_t> values;
  for (const ScheduleFact& fact : facts) values.push_back(fact.value);
  const at::Tensor mine = at::tensor(values).to(device);
  at::Tensor all = at::empty({group->size() * mine.size(0)}, mine.options());
  group->all_gather_into_tensor(all, mine).wait();
  const at::Tensor rows = all.cpu().view({group->size(), mine.size(0)});
  for (int64_t rank = 0; rank < group->size(); ++rank)
    for (size_t i = 0; i < facts.size(); ++i) {
      const int64_t first = rows[0][static_cast<int64_t>(i)].item<int64_t>();
      const int64_t other = rows[rank][static_cast<int64_t>(i)].item<int64_t>();
      TESSERA_CHECK(other == first, UsageError, "the ranks of a pipeline disagree about ", facts[i].name, ": rank ",
                    group->ranks()[0], " has ", first, " and rank ", group->ranks()[rank], " has ", other);
    }
}

std::string list_of(const std::vector<int64_t>& numbers) {
  std::string text;
  for (const int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text.empty() ? "none" : text;
}

// The stages that this rank has must be those that the schedule gives to it.
void check_stages(const std::string& schedule, const std::vector<PipelineStage>& stages,
                  const std::vector<int64_t>& stage_ranks, int64_t rank) {
  std::vector<int64_t> expected, found;
  for (size_t stage = 0; stage < stage_ranks.size(); ++stage)
    if (stage_ranks[stage] == rank) expected.push_back(static_cast<int64_t>(stage));
  for (const PipelineStage& stage : stages) found.push_back(stage.stage_index());
  TESSERA_CHECK(found == expected, UsageError, schedule, " gives rank ", rank, " of the pipeline the stages ",
                list_of(expected), ", and it has ", list_of(found),
                ". build_stages() makes the stages that a schedule needs");
}

bool splits_backward(const ActionTable& compute) {
  for (const RankActions& row : compute)
    for (const std::optional<Action>& entry : row)
      if (entry && std::ranges::any_of(parts_of(*entry),
                                       [](const Action& part) { return part.type == ActionType::BackwardWeight; }))
        return true;
  return false;
}

// DDP and replicate() expect all gradients of a forward in one backward pass.
void check_data_parallel(const std::string& schedule, const std::vector<PipelineStage>& stages,
                         const ActionTable& compute) {
  if (!splits_backward(compute)) return;
  for (const PipelineStage& stage : stages)
    for (const auto& module : stage.module().modules())
      TESSERA_CHECK(
          !data_parallel::averages_in_backward(*module), UsageError, schedule,
          " computes the gradients of inputs and of parameters in separate passes (I and W), and stage ",
          stage.stage_index(),
          " has a module of replicate() or DistributedDataParallel, which averages all "
          "gradients in one pass. Write pipelining::average_gradients(stage, mesh[\"dp\"]) instead, or choose "
          "1F1B or Interleaved1F1B");
}

}  // namespace

PipelineSchedule::PipelineSchedule(const std::string& name, std::vector<PipelineStage> stages, int64_t n_microbatches,
                                   LossFn loss_fn, const GroupRef& group, const ScheduleOptions& options)
    : name_(canonical_name(name)),
      stages_(std::move(stages)),
      n_microbatches_(n_microbatches),
      loss_fn_(std::move(loss_fn)),
      group_(group.group()),
      options_(options) {
  std::ranges::sort(stages_, {}, &PipelineStage::stage_index);
  const int64_t num_stages = stages_.empty() ? 0 : stages_[0].num_stages();
  const std::vector<at::Tensor> parameters = stages_.empty() ? std::vector<at::Tensor>() : stages_[0].parameters();
  check_ranks_agree({{"the number of microbatches", n_microbatches},
                     {"the number of stages of the model", num_stages},
                     {"the number of stages per rank", options.csv.empty() ? static_cast<int64_t>(stages_.size()) : 0},
                     {"the schedule (hash of its name and its CSV)",
                      static_cast<int64_t>(std::hash<std::string>()(name_ + ':' + options.csv))},
                     {"scale_grads", options.scale_grads}},
                    group_, parameters.empty() ? at::Device(at::kCPU) : parameters[0].device());
  auto plan = std::make_shared<Plan>();
  ActionTable compute;
  if (options.csv.empty()) {
    const PipelineShape shape = this->shape();
    TESSERA_CHECK(shape.stages() == num_stages, UsageError, name_, " with ", shape.ranks, " ranks and ",
                  shape.stages_per_rank, " stages per rank has ", shape.stages(), " stages, and the model has ",
                  num_stages, ". Split the model into ", shape.stages(), " stages");
    compute = compute_schedule(name_, shape);
    plan->stage_ranks = stage_ranks(name_, shape);
  } else {
    compute = parse_csv(options.csv);
    check_compute_table(compute, {group_->size(), num_stages, n_microbatches});
    plan->stage_ranks = stage_ranks_of(compute, num_stages);
  }
  check_stages(name_, stages_, plan->stage_ranks, group_->rank());
  check_data_parallel(name_, stages_, compute);
  plan->actions = lower_schedule(compute, plan->stage_ranks, n_microbatches);
  plan->forward_actions = add_send_recv(forward_only(compute), plan->stage_ranks);
  plan_ = std::move(plan);
}

std::vector<at::Tensor> PipelineSchedule::step(const at::Tensor& input, const at::Tensor& target) {
  TESSERA_CHECK(loss_fn_, UsageError, name_, ": step() needs the loss_fn of the constructor. Without one, call eval()");
  const StepOptions options{name_, plan_->stage_ranks, n_microbatches_, loss_fn_, options_.scale_grads, nullptr};
  return run_step(plan_->actions[group_->rank()], stages_, group_, options, input, target).losses;
}

at::Tensor PipelineSchedule::eval(const at::Tensor& input) {
  const LossFn none;
  const StepOptions options{name_, plan_->stage_ranks, n_microbatches_, none, options_.scale_grads, nullptr};
  const StepResult result =
      run_step(plan_->forward_actions[group_->rank()], stages_, group_, options, input, at::Tensor());
  return result.outputs.empty() ? at::Tensor() : at::cat(result.outputs);
}

ScheduleProfile PipelineSchedule::profile(const at::Tensor& input, const at::Tensor& target,
                                          const std::string& other_schedule) {
  TESSERA_CHECK(loss_fn_, UsageError, name_, ": profile() needs the loss_fn of the constructor");
  ActionTable actions = plan_->actions;
  if (!other_schedule.empty()) {
    TESSERA_CHECK(options_.csv.empty(), UsageError, "profile: the schedule has a table of yours, and ", other_schedule,
                  " may need other stages. Make a schedule without ScheduleOptions::csv");
    const PipelineShape shape = this->shape();
    actions =
        lower_schedule(compute_schedule(other_schedule, shape), stage_ranks(other_schedule, shape), n_microbatches_);
  }
  std::vector<StageCost> costs(plan_->stage_ranks.size(), StageCost{0, 0, 0, 0, 0});
  const StepOptions options{name_, plan_->stage_ranks, n_microbatches_, loss_fn_, options_.scale_grads, &costs};
  run_step(plan_->actions[group_->rank()], stages_, group_, options, input, target);
  // Each rank has measured its own stages. The sum over ranks has all.
  std::vector<double> values;
  for (const StageCost& cost : costs)
    values.insert(values.end(), {cost.forward, cost.backward_input, cost.backward_weight, cost.activation});
  const std::vector<at::Tensor> parameters = stages_[0].parameters();
  at::Tensor sums = at::tensor(values, at::kDouble) / n_microbatches_;
  if (!parameters.empty()) sums = sums.to(parameters[0].device());
  group_->all_reduce(sums, ReduceOp::Sum).wait();
  sums = sums.cpu();
  const double* sum = sums.const_data_ptr<double>();
  for (StageCost& cost : costs) {
    cost = {sum[0], sum[1], sum[2], 0, sum[3]};
    sum += 4;
  }
  return {costs, simulate(actions, costs)};
}

PipelineShape PipelineSchedule::shape() const {
  return {group_->size(), static_cast<int64_t>(stages_.size()), n_microbatches_};
}

std::string PipelineSchedule::to_csv() const { return pipelining::to_csv(plan_->actions); }

}  // namespace tessera::pipelining
