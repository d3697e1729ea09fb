#pragma once
#include "tessera/train/config.h"

#include <CLI/CLI.hpp>

#include <map>
#include <string>

namespace tessera::cli {

// Everything a training can be told, as flags and as a file: --model, --training.steps, --config. Flags go before what
// the file says, so they are kept as they were written until it was read.
class TrainFlags {
 public:
  void add_to(CLI::App& command);  // must then stay where it is
  train::TrainConfig config() const;

  bool has(const std::string& key) const;  // "training.batch": was it written on the command line?
  bool has_file() const { return !file_.empty(); }

 private:
  std::map<std::string, std::string> given_;
  std::string file_;
};

}  // namespace tessera::cli
