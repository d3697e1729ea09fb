#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

namespace tessera::comm::region {

// As in c10d::ReduceOp::RedOpType, whose numbers these are.
enum class WireOp : uint8_t { Sum, Avg, Product, Min, Max, BitAnd, BitOr, BitXor };

// out[i] = ins[0][i] op ins[1][i] op ..., in that order, so that the result does not depend on who came first.
// Types narrower than float32 are accumulated in it. `out` may be one of the ins.
// Throws UsageError where the op means nothing for the dtype (max of complex numbers, bits of floats).
void reduce(WireOp op, c10::ScalarType dtype, char* out, std::span<const char* const> ins, int64_t count);
void check_reducible(WireOp op, c10::ScalarType dtype);

}  // namespace tessera::comm::region
