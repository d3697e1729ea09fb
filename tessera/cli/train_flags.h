#pragma once
#include "tessera/train/config.h"

#include <CLI/CLI.hpp>

#include <map>
#include <string>
#include <vector>

namespace tessera::cli {

// The flags of a TrainConfig: --model, --training.steps, ..., and --config for a TOML file.
// Flags override the file, so their text is kept until the file is read.
class TrainFlags {
 public:
  void add_to(CLI::App& command);  // keeps references to this object
  train::TrainConfig config() const;

  bool has(const std::string& key) const;  // has("training.batch"): was the flag given?
  bool has_file() const { return file_flag_ && file_flag_->count() > 0; }

 private:
  std::map<std::string, std::string> values_;
  std::map<std::string, const CLI::Option*> flags_;
  std::string file_;
  const CLI::Option* file_flag_ = nullptr;
};

// The flags that give this config: the options that differ from the defaults.
std::vector<std::string> flags_of(const train::TrainConfig& config);

}  // namespace tessera::cli
