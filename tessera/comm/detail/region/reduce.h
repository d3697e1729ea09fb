#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

namespace tessera::comm::region {

// The values of c10d::ReduceOp::RedOpType.
enum class WireOp : uint8_t { Sum, Avg, Product, Min, Max, BitAnd, BitOr, BitXor };

// out[i] = ins[0][i] op ins[1][i] op ..., in rank order, so that the result does not depend on arrival order.
// Floating types narrower than float32 accumulate in float32. `out` may be one of the ins.
void reduce(WireOp op, c10::ScalarType dtype, char* out, std::span<const char* const> ins, int64_t count);
// Throws UsageError if the op is not defined for the dtype (max of complex numbers, bitwise ops on floats).
void check_reducible(WireOp op, c10::ScalarType dtype);

}  // namespace tessera::comm::region
