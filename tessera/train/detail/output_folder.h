#pragma once
#include "tessera/train/config.h"

#include <string>
#include <vector>

// The output folder of a training run belongs to one run at a time.
namespace tessera::train {

// Locks the output folder and, if it is another one, the checkpoint folder, as long as this object lives. A process
// that ends in any way gives them back (flock).
class OutputFolder {
 public:
  // Creates and locks the folders of the config and writes config.toml. An empty metrics.output gets a new folder:
  // outputs/20260131-174502-gpt-tiny, or ...-2 if that exists.
  // A folder with the outputs of an earlier run needs checkpoint.resume, or `overwrite`, which deletes these outputs,
  // checkpoints included.
  // Throws UsageError for a folder that is in use, that an earlier run has used, or that cannot be created; SystemError
  // if the disk is full. Requires: only one rank calls it.
  OutputFolder(const TrainConfig& config, bool overwrite);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  OutputFolder() = default;
  void lock(const std::string& folder);

  std::string path_;
  std::vector<int> locks_;
};

// Reports what OutputFolder would report, before ranks start. Creates the folder of the config, if it names one.
void check_output(const TrainConfig& config, bool overwrite);

}  // namespace tessera::train
