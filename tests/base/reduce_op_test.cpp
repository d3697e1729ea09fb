#include "tessera/base/reduce_op.h"

#include "tessera/base/error.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace tessera {
namespace {

constexpr ReduceOp kAll[] = {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min};

TEST(ReduceOp, ParsesWhatItPrints) {
  for (auto op : kAll) {
    std::ostringstream text;
    text << op;
    EXPECT_EQ(parse_reduce_op(text.str()), op) << text.str();
  }
}

TEST(ReduceOp, HasTheNamesOfC10d) {
  std::string names;
  for (auto op : kAll) names += std::string(to_string(op)) + " ";
  EXPECT_EQ(names, "sum avg product max min ");
}

TEST(ReduceOp, ThrowsForOtherNames) {
  for (auto wrong : {"", "Sum", "mean", "sum "}) EXPECT_THROW(parse_reduce_op(wrong), UsageError) << wrong;
  try {
    parse_reduce_op("mean");
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "'mean' is not a reduction; write sum, avg, product, max or min");
  }
}

}  // namespace
}  // namespace tessera
