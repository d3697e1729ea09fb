#pragma once
#include <cstdint>

namespace tessera {

// An attention module derives from this class to report its head size. parallelize_module then refuses a plan that
// would split a head between ranks. The size applies to all Linear children of the module: their output features (for
// the output projection: its input features) consist of complete heads.
// Example:  struct AttentionImpl : torch::nn::Cloneable<AttentionImpl>, AttentionHeads { ... };
class AttentionHeads {
 public:
  virtual ~AttentionHeads() = default;
  virtual int64_t head_dim() const = 0;  // features per head
};

}  // namespace tessera
