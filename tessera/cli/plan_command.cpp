#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/plan_report.h"
#include "tessera/cli/train_flags.h"
#include "tessera/tensor_parallel/detail/plan_text.h"
#include "tessera/train/plan.h"

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>

namespace tessera::cli {
namespace {

struct Arguments {
  TrainFlags flags;
  std::optional<int64_t> ranks, tp, sequence;
  std::string plan_file;
  bool print_plan = false;

  // A whole training, unless layers alone are asked about: by --tp, --plan or --seq, or by nothing that is a
  // training's.
  bool is_of_training() const {
    return !tp && !sequence && plan_file.empty() &&
           (ranks || flags.has_file() || flags.has("parallel.mesh") || flags.has("parallel.fsdp"));
  }
};

Plan read_plan(const std::string& file) {
  std::ifstream in(file);
  TESSERA_CHECK(in, UsageError, "there is no file '", file, "' to read a plan from");
  return parse_plan(std::string(std::istreambuf_iterator<char>(in), {}));
}

PlanRequest request_from(const Arguments& arguments) {
  const auto config = arguments.flags.config();
  PlanRequest request;
  request.options = {config.parallel.sequence_parallel, config.parallel.loss_parallel};
  if (arguments.flags.has("model.name")) request.model = config.model.name;
  if (arguments.flags.has("training.batch")) request.batch = config.training.batch;
  if (arguments.tp) request.ranks = *arguments.tp;
  if (arguments.sequence) request.sequence = *arguments.sequence;
  if (!arguments.plan_file.empty()) request.plan = read_plan(arguments.plan_file);
  return request;
}

void plan_a_training(const Arguments& arguments) {
  const auto config = arguments.flags.config();
  const int64_t ranks = arguments.ranks ? *arguments.ranks : std::max<int64_t>(1, train::ranks_of(config.parallel));
  const auto reasons = train::config_errors(config, ranks);
  std::string list;
  for (const auto& reason : reasons) list += "\n  " + reason;
  TESSERA_CHECK(reasons.empty(), UsageError, "this cannot run:", list);
  std::cout << train::plan_training(config, ranks);
}

void plan_as_asked(const Arguments& arguments) {
  if (arguments.print_plan) {
    const auto request = request_from(arguments);
    std::cout << (request.plan ? *request.plan
                               : models::tensor_parallel_plan(models::find_config(request.model), request.options));
  } else if (arguments.is_of_training()) {
    plan_a_training(arguments);
  } else {
    std::cout << make_plan_report(request_from(arguments));
  }
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto given = std::make_shared<Arguments>();
  auto* command = app.add_subcommand(
      "plan", "Checks how a training or a tensor-parallel plan is laid out, and shows it, before anything runs");
  command->add_option("-n,--ranks", given->ranks, "Plan a training on so many ranks; without it as many as --mesh has");
  command->add_option("--tp", given->tp, "Layer by layer instead: ranks to cut the model over (2)");
  command->add_option("--seq", given->sequence, "Layer by layer: tokens of a row (128)");
  command->add_option("--plan", given->plan_file, "Layer by layer: a file with a plan; without it the model's own");
  command->add_flag("--print-plan", given->print_plan, "Print the plan itself, to edit and pass to --plan, and stop");
  given->flags.add_to(*command);
  command->footer(
      "Examples:\n"
      "  tessera plan --model gpt2-1558m --mesh dp=16,fsdp=16,tp=4 --heads 32 --data tokens.bin --batch 1024\n"
      "  tessera plan --config my.toml --ranks 64\n"
      "  tessera plan --model gpt2-124m --tp 4 --sequence-parallel\n"
      "  tessera plan --model llama-1b --tp 8 --print-plan > my.plan; tessera plan --model llama-1b --tp 8 --plan "
      "my.plan");
  command->callback([given] { plan_as_asked(*given); });
}

}  // namespace tessera::cli
