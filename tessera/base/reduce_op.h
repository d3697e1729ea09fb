#pragma once
#include <cstdint>
#include <iosfwd>
#include <string_view>

namespace tessera {

// How equal-shaped values of several ranks become one.
enum class ReduceOp : uint8_t { Sum, Avg, Product, Max, Min };

const char* to_string(ReduceOp op);            // "sum", "avg", "product", "max", "min"
ReduceOp parse_reduce_op(std::string_view s);  // the inverse; throws UsageError that lists the names
std::ostream& operator<<(std::ostream& out, ReduceOp op);

}  // namespace tessera
