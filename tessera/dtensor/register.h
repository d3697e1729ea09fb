#pragma once
#include "tessera/rules/detail/rule.h"

#include <string_view>
#include <vector>

// Sharding rules for custom ops (PyTorch: register_sharding).
namespace tessera {

namespace detail {
// Installs the DTensor kernels of every aten op. Everything that makes a DTensor calls it; it runs once.
void register_kernels();
}  // namespace detail

// Options of register_sharding.
struct ShardingOptions {
  rules::ListMode lists = rules::ListMode::Joint;  // how the elements of a tensor list are sharded
  bool reads_scalars = false;                      // the strategies depend on the value of a Scalar or float argument
};
// Registers the sharding strategies of a custom op. Each strategy is for one mesh axis: the placements of the inputs
// and of the outputs.
//
//   register_sharding("my::scale_rows", {
//       {{Replicate(), Replicate()}, {Replicate()}},
//       {{Shard(0), Shard(0)}, {Shard(0)}},
//   });
//
// This form is for an op whose outputs have the sizes of its first tensor.
void register_sharding(std::string_view op, std::vector<rules::Strategy> strategies);
// The general form: a function from the call to a rules::Rule, which has the strategies and the output sizes.
void register_sharding(std::string_view op, rules::RuleFn rule, ShardingOptions options = {});
// Registers for `op` the rule of the op `like`.
void same_as(std::string_view op, std::string_view like);

}  // namespace tessera
