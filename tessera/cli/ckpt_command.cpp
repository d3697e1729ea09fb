#include "tessera/base/error.h"
#include "tessera/cli/check_arguments.h"
#include "tessera/cli/ckpt_report.h"
#include "tessera/cli/commands.h"

#include <iostream>
#include <memory>

namespace tessera::cli {

void add_ckpt_command(CLI::App& app) {
  struct CkptArguments {
    std::string action;
    std::vector<std::string> paths;
    ConvertOptions convert;
    double tolerance = 0;
    bool json = false;
  };
  auto arguments = std::make_shared<CkptArguments>();
  auto* command = app.add_subcommand("ckpt", "Show, verify, compare and convert checkpoints");
  command->add_option("action", arguments->action, "show, verify, diff or convert")
      ->required()
      ->check(CLI::IsMember({"show", "verify", "diff", "convert"}));
  command
      ->add_option(
          "paths", arguments->paths,
          "A checkpoint, or a folder with step-N: of Tessera, safetensors, Hugging Face, or .distcp of PyTorch")
      ->required();
  command->add_option("--tolerance", arguments->tolerance, "diff: largest difference of elements that counts as equal")
      ->check(in_range(0, 1e9));
  command->add_option("--to", arguments->convert.to, "convert: safetensors, distcp (PyTorch's DCP) or tessera")
      ->check(CLI::IsMember({"safetensors", "distcp", "tessera"}))
      ->capture_default_str();
  command->add_option("--prefix", arguments->convert.prefix,
                      "convert: only the tensors with this prefix, as model. of a training, and without it");
  const auto families = CLI::IsMember({"auto", "gpt2", "llama", "mixtral"});
  command
      ->add_option(
          "--from-hf", arguments->convert.from_hf,
          "convert: names of this Hugging Face model become those of Tessera's (auto: as its config.json says)")
      ->check(families);
  command->add_option("--to-hf", arguments->convert.to_hf, "convert: names become those of this Hugging Face model")
      ->check(CLI::IsMember({"gpt2", "llama", "mixtral"}));
  command->add_option("--heads", arguments->convert.heads, "convert: attention heads of llama and mixtral")
      ->check(in_range(0, 65536));
  command->add_option("--kv-heads", arguments->convert.kv_heads, "convert: key/value heads (0: as --heads)")
      ->check(in_range(0, 65536));
  command->add_flag("--json", arguments->json, "show: print JSON");
  command->footer(
      "verify and diff exit with 1 if something is damaged or differs.\nExamples:\n"
      "  tessera ckpt show out/checkpoints\n"
      "  tessera ckpt verify out/checkpoints/step-1000\n"
      "  tessera ckpt diff out/checkpoints/step-900 out/checkpoints/step-1000\n"
      "  tessera ckpt convert Llama-3.2-1B llama --from-hf auto --to tessera\n"
      "  tessera ckpt convert out/checkpoints export --prefix model. --to-hf llama --heads 32 --kv-heads 8\n"
      "  tessera ckpt convert out/checkpoints for_python --to distcp");
  command->callback([arguments] {
    const auto& a = *arguments;
    const size_t needed = a.action == "diff" || a.action == "convert" ? 2 : 1;
    TESSERA_CHECK(a.paths.size() == needed, UsageError, "ckpt ", a.action, " needs ",
                  needed == 1 ? "one path" : "two paths", ", and got ", a.paths.size());
    if (a.action == "show") return show_checkpoint(a.paths[0], a.json, std::cout);
    if (a.action == "convert") return convert_checkpoint(a.paths[0], a.paths[1], a.convert, std::cout);
    if (a.action == "verify")
      TESSERA_CHECK(verify_checkpoint(a.paths[0], std::cout), SystemError, "ckpt verify: the checkpoint is damaged");
    if (a.action == "diff")
      TESSERA_CHECK(diff_checkpoints(a.paths[0], a.paths[1], a.tolerance, std::cout), SystemError,
                    "ckpt diff: the checkpoints differ");
  });
}

}  // namespace tessera::cli
