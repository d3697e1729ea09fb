#pragma once
#include "tessera/pipelining/detail/action_table.h"

namespace tessera::pipelining {

// Ranks may have different numbers of stages.
struct TableShape {
  int64_t ranks = 1;
  int64_t stages = 1;
  int64_t microbatches = 1;
};

// Checks a table of compute actions that a user wrote. Each stage has, on one rank and for each microbatch, one F and
// then one B, or one I and then one W. Throws UsageError that names what is missing, repeated or out of order. Whether
// ranks would wait for ever is found by lower_schedule().
void check_compute_table(const ActionTable& table, const TableShape& shape);

// The rank of each stage in such a table.
std::vector<int64_t> stage_ranks_of(const ActionTable& table, int64_t stages);

}  // namespace tessera::pipelining
