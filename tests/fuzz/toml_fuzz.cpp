// Config files in TOML: what a config prints reads back as the same config.
#include "tessera/base/error.h"
#include "tessera/cli/train_config_file.h"

#include "fuzz_targets.h"
#include "memory_file.h"

namespace tessera::fuzz {
namespace {

train::TrainConfig config_from(std::string_view text) {
  train::TrainConfig config;
  cli::read_train_config(config, MemoryFile(text).path());
  return config;
}

}  // namespace

void fuzz_toml(std::string_view input) {
  train::TrainConfig config;
  try {
    config = config_from(input);
  } catch (const UsageError&) {
    return;
  }
  const auto text = c10::str(config);
  require(c10::str(config_from(text)) == text, "the text is another config:\n", text);
}

}  // namespace tessera::fuzz
