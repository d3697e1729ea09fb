// Replaces toml.cpp in builds without toml++.
#include "tessera/base/error.h"
#include "tessera/cli/train_config_file.h"

namespace tessera::cli {

void read_train_config(train::TrainConfig&, const std::string& file) {
  TESSERA_FAIL(UsageError, "cannot read ", file,
               ": this program was built without toml++ (libtomlplusplus-dev); use flags, as in --training.steps 100");
}

}  // namespace tessera::cli
