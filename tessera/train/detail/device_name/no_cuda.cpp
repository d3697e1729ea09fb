#include "tessera/train/detail/device.h"

namespace tessera::train {

std::string device_name(at::Device) { return ""; }

}  // namespace tessera::train
