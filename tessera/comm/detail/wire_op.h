#pragma once
#include "tessera/base/error.h"
#include "tessera/base/reduce_op.h"
#include "tessera/tracing/detail/invariant_scope.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace tessera::comm::detail {

// Of a reduction of `dtype` over `ranks` ranks. Throws UsageError for a sum of floats under Numerics::Invariant.
inline c10d::ReduceOp wire_op(ReduceOp op, c10::ScalarType dtype, int64_t ranks) {
  const bool exact = op == ReduceOp::Max || op == ReduceOp::Min || c10::isIntegralType(dtype, true) || ranks == 1;
  TESSERA_CHECK(exact || !invariant_scope_is_open(), UsageError, "Numerics::Invariant: a collective reduces ", dtype,
                " (", op, ") over ", ranks, " ranks, so its bits depend on their number. Reduce gradients by ",
                "VirtualShards (no_sync() for DistributedDataParallel), let an op on DTensors compute other sums, or ",
                "call the collective outside of the scope.");
  switch (op) {
    case ReduceOp::Sum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::Avg:
      return c10d::ReduceOp::SUM;  // the inputs are divided before; the same for all backends
    case ReduceOp::Product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
  }
  TESSERA_FAIL(InternalError, "reduce op ", static_cast<int>(op));
}

}  // namespace tessera::comm::detail
