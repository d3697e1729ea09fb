#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/plan_report.h"
#include "tessera/tensor_parallel/plan_text.h"

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>

namespace tessera::cli {
namespace {

Plan read_plan(const std::string& file) {
  std::ifstream in(file);
  TESSERA_CHECK(in, UsageError, "there is no file '", file, "' to read a plan from");
  return parse_plan(std::string(std::istreambuf_iterator<char>(in), {}));
}

}  // namespace

void add_plan_command(CLI::App& app) {
  struct Arguments {
    PlanRequest request;
    std::string file;
    bool print_plan = false;
  };
  auto given = std::make_shared<Arguments>();
  auto* command =
      app.add_subcommand("plan", "Checks a tensor-parallel plan and shows what it does, before anything runs");
  command->add_option("--model", given->request.model, "A model by name")->capture_default_str();
  command->add_option("--tp", given->request.ranks, "Ranks to cut the model over")->capture_default_str();
  command->add_option("--plan", given->file, "A file with a plan; without it the model's own");
  command->add_flag("--sequence-parallel", given->request.options.sequence_parallel,
                    "Cut activations along the sequence between the parts of a layer");
  command->add_flag("--loss-parallel", given->request.options.loss_parallel,
                    "Keep logits cut along the vocabulary; the loss is computed on the pieces");
  command->add_option("--batch", given->request.batch, "Rows of a batch")->capture_default_str();
  command->add_option("--seq", given->request.sequence, "Tokens of a row")->capture_default_str();
  command->add_flag("--print-plan", given->print_plan, "Print the plan itself, to edit and pass to --plan, and stop");
  command->footer(
      "Examples:\n  tessera plan --model gpt2-124m --tp 4 --sequence-parallel\n"
      "  tessera plan --model llama-1b --tp 8 --print-plan > my.plan; tessera plan --model llama-1b --tp 8 --plan "
      "my.plan");
  command->callback([given] {
    auto request = given->request;
    if (!given->file.empty()) request.plan = read_plan(given->file);
    if (given->print_plan) {
      std::cout << (request.plan ? *request.plan
                                 : models::tensor_parallel_plan(models::find_config(request.model), request.options));
      return;
    }
    std::cout << make_plan_report(request);
  });
}

}  // namespace tessera::cli
