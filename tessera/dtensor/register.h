#pragma once
#include "tessera/rules/rule.h"

#include <string_view>
#include <vector>

namespace tessera {

namespace detail {
// Installs the kernels for every aten op. Called by init() and by whatever makes a distributed tensor; runs once.
void register_kernels();
}  // namespace detail

// Rules for a user's own op, in five lines:
//
//   register_sharding("my::scale", [](const rules::OpQuery& q) {
//     return rules::pointwise(q, {.linear = true});
//   });
//
// or as rows over one mesh axis, for an op whose result is shaped like its first tensor:
//
//   register_sharding("my::scale", {{{R, R}, {R}}, {{Shard(0), R}, {Shard(0)}}});
void register_sharding(std::string_view op, rules::RuleFn rule);
void register_sharding(std::string_view op, std::vector<rules::Row> rows);
// The rule of another op under this name.
void same_as(std::string_view op, std::string_view like);

}  // namespace tessera
