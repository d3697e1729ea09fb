#pragma once
#include <cstdint>
#include <iosfwd>
#include <string_view>

namespace tessera {

// How a collective combines the tensors of several ranks (PyTorch: ReduceOp).
enum class ReduceOp : uint8_t { Sum, Avg, Product, Max, Min };

// "sum", "avg", "product", "max", "min"
const char* to_string(ReduceOp op);
// The inverse of to_string. Throws UsageError that lists the names.
ReduceOp parse_reduce_op(std::string_view s);
std::ostream& operator<<(std::ostream& out, ReduceOp op);

}  // namespace tessera
