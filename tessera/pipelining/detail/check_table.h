#pragma once
#include "tessera/pipelining/detail/action_table.h"
#include "tessera/pipelining/detail/schedules.h"

namespace tessera::pipelining {

// Checks a table of compute actions that a user wrote. Each stage has, on one rank and for each microbatch, one F and
// then one B, or one I and then one W. Throws UsageError that names what is missing, repeated or out of order. Whether
// ranks would wait for ever is found by lower_schedule().
void check_compute_table(const ActionTable& table, const PipelineShape& shape);

// The rank of each stage in such a table.
std::vector<int64_t> stage_ranks_of(const ActionTable& table, int64_t stages);

}  // namespace tessera::pipelining
