#pragma once
#include "tessera/base/error.h"
#include "tessera/base/reduce_op.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace tessera::comm::detail {

inline c10d::ReduceOp wire_op(ReduceOp op) {
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
