#pragma once
#include <cstdint>

namespace tessera {

// An attention module says how wide its heads are, so that a plan that would cut through one is refused. Holds for all
// of its linear children: their outputs, or for the last one its inputs, are whole heads.
// Example:  struct AttentionImpl : torch::nn::Cloneable<AttentionImpl>, AttentionHeads { ... };
class AttentionHeads {
 public:
  virtual ~AttentionHeads() = default;
  virtual int64_t head_dim() const = 0;
};

}  // namespace tessera
