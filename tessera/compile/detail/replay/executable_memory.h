#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <c10/core/Storage.h>

// Memory of a program, for executable.cpp and executable_memory.cpp.
namespace tessera::compiler {

c10::Storage allocate_storage(int64_t bytes, c10::Device device);
// Returns memory that LibTorch's allocator keeps for later to the device.
void free_cached_memory(c10::Device device);
// The device of a value that the node uses; the CPU if all are there.
c10::DeviceType device_of(const Program& program, const Node& node);
// Does the op allocate this result? An op that writes to arguments may return them and new tensors.
bool is_new_memory(const Program& program, const Node& node, ValueId result);

}  // namespace tessera::compiler
