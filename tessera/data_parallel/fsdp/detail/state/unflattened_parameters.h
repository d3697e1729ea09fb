#pragma once
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/state/detail/module_slots.h"

#include <memory>
#include <vector>

// A module's parameters as they were before it was made flat: for state dicts.
namespace tessera::data_parallel::fsdp {

struct FlatMember {
  std::shared_ptr<ShardedModule> sharded = {};  // null: not a part of a flat parameter
  size_t index = 0;

  const Unit& unit() const { return *sharded->turn->unit; }
  const Member& member() const { return unit().members()[index]; }
};

// All names of the module, with its buffers. The tensor of a part of a flat parameter is a stand-in without memory that
// has its shape, and lies over other axes as it does. Units are closed: parameters are sharded afterwards.
struct Originals {
  explicit Originals(torch::nn::Module& module);

  std::vector<tessera::detail::ModuleSlot> slots;
  std::vector<FlatMember> flat;                       // by slot
  std::vector<std::shared_ptr<ShardedModule>> units;  // the flat ones, outer ones first
  std::vector<Tensors> stand_ins;                     // by unit, by member
};

// How a value goes into a state dict.
struct Form {
  bool full, to_cpu;

  at::Tensor plain(const at::Tensor& value) const;  // of something that is not flat: `value` itself, if it may be
  // `whole`: what this rank computes with of a member. All ranks call it, in the same order.
  at::Tensor flat(const ShardedModule& sharded, const Member& member, const at::Tensor& whole) const;
};

}  // namespace tessera::data_parallel::fsdp
