#pragma once
#include "tessera/compile/detail/trace/call_arguments.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <string>
#include <vector>

namespace tessera::compiler {

// The properties of a call that a program is specialized for, as the guards of torch.compile: a cached program is
// reused only if the key of the new call is equal.
struct CacheKey {
  struct TensorKey {
    Type type;
    SpecRef spec;  // of a DTensor; null: a plain tensor
    bool requires_grad = false;
    int aliases = -1;         // index of an earlier tensor with the same storage; -1: none
    int64_t alias_bytes = 0;  // offset from the first byte of that tensor to the first byte of this one
    bool operator==(const TensorKey&) const = default;
  };
  std::vector<const void*> objects;   // identities of modules, leaves and optimizers
  std::vector<uint64_t> generations;  // of optimizers: changes when their state or options are replaced
  std::vector<char> modes;            // grad mode, autocast, training mode of each module
  std::vector<TensorKey> tensors;
  std::vector<double> numbers;
  std::vector<std::string> strings;
  bool operator==(const CacheKey&) const = default;

  // The reason for a recompilation: the first difference, as "argument 0 is f32[64, 10], it was f32[32, 10]".
  std::string difference(const CacheKey& before) const;
};
CacheKey cache_key_of(const CallArguments& arguments);

}  // namespace tessera::compiler
