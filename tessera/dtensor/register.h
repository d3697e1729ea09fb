#pragma once
#include "tessera/rules/detail/rule.h"

#include <string_view>
#include <vector>

namespace tessera {

namespace detail {
// Installs the kernels for every aten op. Called by whatever makes a distributed tensor; runs once.
void register_kernels();
}  // namespace detail

// Rules for a user's own op, in five lines:
//
//   register_sharding("my::scale_rows", {
//       {{Replicate(), Replicate()}, {Replicate()}},
//       {{Shard(0), Shard(0)}, {Shard(0)}},
//   });
//
// Rows over one mesh axis, for an op whose results are shaped like its first tensor; a function from the call to a
// rules::Rule for any other.
struct ShardingOptions {
  rules::ListMode lists = rules::ListMode::Joint;
  bool reads_scalars = false;  // rows depend on the value of a Scalar or float argument
};
void register_sharding(std::string_view op, rules::RuleFn rule, ShardingOptions options = {});
void register_sharding(std::string_view op, std::vector<rules::Row> rows);
// The rule of another op under this name.
void same_as(std::string_view op, std::string_view like);

}  // namespace tessera
