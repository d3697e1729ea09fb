#pragma once
#include <cstdint>
#include <vector>

#include "tessera/pipelining/detail/action_table.h"

// From a table of compute actions to the table that ranks execute: with the communication between stages, the
// parameters of sharded stages, and the reduction of gradients. Waits are dropped: from here on data decides who waits.
namespace tessera::pipelining {

// Adds UNSHARD before a stage is needed and RESHARD when it leaves the next `active` stages that the rank will use.
RankActions add_unshard_reshard(const RankActions& actions, size_t active = 3);

// Adds REDUCE_GRAD behind the last backward of each stage.
RankActions add_reduce_grad(const RankActions& actions, int64_t microbatches);

// Adds a SEND behind each action whose result another rank needs, and the matching RECV on that rank, in an order in
// which no rank waits for ever. Throws UsageError if no such order exists.
ActionTable add_send_recv(const ActionTable& table, const std::vector<int64_t>& stage_ranks);

// All of it.
ActionTable lower_schedule(const ActionTable& compute, const std::vector<int64_t>& stage_ranks, int64_t microbatches);

}  // namespace tessera::pipelining
