#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/rules_report.h"
#include "tessera/dtensor/register.h"
#include "tessera/numerics/numerics.h"

#include <iostream>
#include <memory>

namespace tessera::cli {

void add_rules_command(CLI::App& app) {
  struct RulesArguments {
    std::string action, op, mesh = "x=4";
    std::vector<std::string> call;
    bool json = false, markdown = false;
  };
  auto arguments = std::make_shared<RulesArguments>();
  auto* command = app.add_subcommand("rules", "Show which ops have sharding strategies, and test them");
  command->add_option("action", arguments->action, "coverage, missing, show, verify, explain or invariant")
      ->required()
      ->check(CLI::IsMember({"coverage", "missing", "show", "verify", "explain", "invariant"}));
  command->add_option("op", arguments->op, "Op with namespace and overload: aten::add.Tensor");
  command->add_option("call", arguments->call, "Sizes of its tensors, as 8x10, then other arguments, as dim=1");
  command->add_option("--mesh", arguments->mesh, "Mesh of explain")->capture_default_str();
  command->add_flag("--json", arguments->json, "Print JSON");
  command->add_flag("--markdown", arguments->markdown, "Print the page docs/ops.md (coverage)");
  command->footer(
      "Examples:\n  tessera rules coverage\n  tessera rules show aten::mm 8x10 10x4\n"
      "  tessera rules verify aten::sum.dim_IntList 5x3 \"dim=[1]\"\n"
      "  tessera rules invariant\n"
      "  tessera rules explain aten::mm \"8x10:S(0)\" 10x4:R --mesh tp=4");
  command->callback([arguments] {
    const auto& a = *arguments;
    TESSERA_CHECK(!a.op.empty() || (a.action != "show" && a.action != "explain"), UsageError, "rules ", a.action,
                  " needs an op, as aten::add.Tensor");
    if (a.action == "show") return show_op(a.op, a.call, a.json, std::cout);
    if (a.action == "explain") return explain_op(a.op, a.call, a.mesh, a.json, std::cout);
    if (a.action == "verify") {
      TESSERA_CHECK(verify_op(a.op, a.call, a.json, std::cout), SystemError, "rules verify: a strategy is wrong");
      return;
    }
    if (a.action == "invariant") {
      tessera::detail::register_kernels();
      for (const auto& [op, how] : invariant_ops()) std::cout << op << "  " << how << '\n';
      return;
    }
    const auto ops = coverage_of_list(pytorch_ops());
    if (a.action == "missing") return print_missing(ops, a.json, std::cout);
    if (a.markdown) return print_coverage_markdown(ops, std::cout);
    a.json ? print_coverage_json(ops, std::cout) : print_coverage(ops, std::cout);
  });
}

}  // namespace tessera::cli
