#pragma once
#include "tessera/checkpoint/save.h"
#include "tessera/train/config.h"

#include <string>
#include <vector>

// A resumed run follows the options of its own config. These functions say which of them differ from the saved run.
namespace tessera::train {

// The options that a checkpoint remembers, as "key=text" lines: data, training, optimizer and parallel.
std::string saved_options(const TrainConfig& config);

// One line per option that differs, with what it changes. `saved` are the values of a checkpoint, whose "options" are
// the text of saved_options(); without them, as in checkpoints of older versions, nothing is reported. Example:
// "training.batch is 32, and was 64; the data continue after sample 640"
std::vector<std::string> resume_changes(const dcp::Values& saved, const TrainConfig& config);

}  // namespace tessera::train
