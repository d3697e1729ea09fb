#include "tessera/base/error.h"
#include "tessera/cli/check_arguments.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/plan_report.h"
#include "tessera/cli/train_flags.h"
#include "tessera/tensor_parallel/detail/plan_text.h"
#include "tessera/train/detail/config_options.h"
#include "tessera/train/detail/plan_file.h"
#include "tessera/train/plan.h"

#include <iostream>
#include <memory>
#include <optional>

namespace tessera::cli {
namespace {

struct PlanArguments {
  TrainFlags flags;
  std::optional<int64_t> ranks, tp, sequence;
  std::optional<double> device_memory;  // in GB
  std::string plan_file;
  bool print_plan = false;

  // true: plan a training run. false: report a tensor-parallel plan layer by layer, if --tp, --plan or --seq is set or
  // no flag says how the training run is distributed.
  bool plans_training() const {
    return !tp && !sequence && plan_file.empty() &&
           (ranks || flags.has_file() || flags.has("parallel.mesh") || flags.has("parallel.fsdp"));
  }
};

PlanRequest report_request(const PlanArguments& arguments) {
  const auto config = arguments.flags.config();
  PlanRequest request;
  request.options = {config.parallel.sequence_parallel, config.parallel.loss_parallel};
  if (arguments.flags.has("model.name")) request.model = config.model.name;
  if (arguments.flags.has("training.batch")) request.batch = config.training.batch;
  if (arguments.tp) request.ranks = *arguments.tp;
  if (arguments.sequence) request.sequence = *arguments.sequence;
  if (!arguments.plan_file.empty()) request.plan = train::read_plan_file(arguments.plan_file);
  return request;
}

void print_training_plan(const PlanArguments& arguments) {
  const auto config = arguments.flags.config();
  const int64_t ranks = arguments.ranks ? *arguments.ranks : std::max<int64_t>(1, train::ranks_of(config.parallel));
  const auto errors = train::config_errors(config, ranks);
  std::string list;
  for (const auto& error : errors) list += "\n  " + error;
  TESSERA_CHECK(errors.empty(), UsageError, "this config cannot run:", list);
  auto plan = train::plan_training(config, ranks);
  if (arguments.device_memory) plan.device_memory = static_cast<int64_t>(*arguments.device_memory * 1e9);
  std::cout << plan;
}

void run_plan(const PlanArguments& arguments) {
  if (arguments.print_plan) {
    const auto request = report_request(arguments);
    std::cout << (request.plan ? *request.plan
                               : models::tensor_parallel_plan(models::find_config(request.model), request.options));
  } else if (arguments.plans_training()) {
    print_training_plan(arguments);
  } else {
    std::cout << make_plan_report(report_request(arguments));
  }
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto arguments = std::make_shared<PlanArguments>();
  auto* command = app.add_subcommand(
      "plan", "Check a training config or a tensor-parallel plan, and predict placements, memory and communication");
  command
      ->add_option("-n,--ranks", arguments->ranks, "Number of ranks of the training run (default: the size of --mesh)")
      ->check(in_range(1, train::kMaxRanks));
  command
      ->add_option("--device-memory", arguments->device_memory,
                   "Memory of each rank's device in GB (default: of a device of this host)")
      ->check(in_range(0, 1e6));
  command
      ->add_option("--tp", arguments->tp,
                   "Report the tensor-parallel plan layer by layer, for this number of ranks (default 2)")
      ->check(in_range(1, 4096));
  command->add_option("--seq", arguments->sequence, "Layer-by-layer report: sequence length (default 128)")
      ->check(in_range(1, 65536));
  command->add_option("--plan", arguments->plan_file, "Layer-by-layer report: plan file (default: the model's plan)");
  command->add_flag("--print-plan", arguments->print_plan,
                    "Print the tensor-parallel plan, to edit and pass to --plan, and exit");
  arguments->flags.add_to(*command);
  command->footer(
      "Exits with 2 if the config cannot run.\n"
      "Examples:\n"
      "  tessera plan --model gpt2-1558m --mesh dp=16,fsdp=16,tp=4 --heads 32 --data tokens.bin --batch 1024\n"
      "  tessera plan --config my.toml --ranks 64\n"
      "  tessera plan --model gpt2-124m --tp 4 --sequence-parallel\n"
      "  tessera plan --model llama-1b --tp 8 --print-plan > my.plan; tessera plan --model llama-1b --tp 8 --plan "
      "my.plan");
  command->callback([arguments] { run_plan(*arguments); });
}

}  // namespace tessera::cli
