#include "tessera/base/reduce_op.h"

#include "tessera/base/error.h"

#include <array>
#include <ostream>

namespace tessera {
namespace {
constexpr std::array kReduceOpNames = {"sum", "avg", "product", "max", "min"};  // in the order of the enum
}  // namespace

const char* to_string(ReduceOp op) { return kReduceOpNames[static_cast<size_t>(op)]; }

ReduceOp parse_reduce_op(std::string_view s) {
  for (size_t i = 0; i < kReduceOpNames.size(); i++)
    if (s == kReduceOpNames[i]) return static_cast<ReduceOp>(i);
  TESSERA_FAIL(UsageError, "'", s, "' is not a reduction; write sum, avg, product, max or min");
}

std::ostream& operator<<(std::ostream& out, ReduceOp op) { return out << to_string(op); }

}  // namespace tessera
