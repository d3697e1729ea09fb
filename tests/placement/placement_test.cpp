#include "tessera/placement/placement.h"

#include "tessera/base/error.h"
#include "tests/fixtures/any_placement.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <limits>
#include <sstream>

namespace tessera {
namespace {

TEST(Placement, PrintsTheShortForm) {
  const std::pair<Placement, const char*> kTexts[] = {
      {Replicate(), "R"},
      {Shard(0), "S(0)"},
      {Shard(-1), "S(-1)"},
      {Shard(1, 64), "S(1,64)"},
      {StridedShard(0, 2), "SS(0,2)"},
      {Partial(), "P(sum)"},
      {Partial(ReduceOp::Product), "P(product)"},
      {NormPartial(2), "P(norm,2)"},
      {NormPartial(0.1), "P(norm,0.1)"},
      {NormPartial(std::numeric_limits<double>::infinity()), "P(norm,inf)"},
      {MaskPartial(), "P(mask)"},
  };
  for (const auto& [placement, text] : kTexts) {
    EXPECT_EQ(to_string(placement), text);
    EXPECT_EQ(parse_placement(text), placement) << text;
  }
  std::ostringstream out;
  out << Shard(3);
  EXPECT_EQ(out.str(), "S(3)");
  EXPECT_EQ(parse_placement(" P "), Partial());
  EXPECT_EQ(parse_placement("S( 0 , 4 )"), Shard(0, 4));
}

TEST(Placement, PrintsAndParsesLists) {
  Placements two{Shard(0, 4), Replicate()};
  EXPECT_EQ(to_string(two), "[S(0,4), R]");
  EXPECT_EQ(parse_placements("[S(0,4), R]"), two);
  EXPECT_EQ(parse_placements("S(0,4),R"), two);
  EXPECT_EQ(parse_placements("[]"), Placements());
}

TEST(Placement, ParseThrowsForOtherText) {
  for (const char* text : {"", "Q", "S", "S()", "S(x)", "S(0", "S(0,0)", "S(0,1,2)", "SS(0)", "P(mean)", "P(norm)",
                           "P(norm,0)", "P(norm,nan)", "R(0)", "S(1000)", "S(0)x"})
    EXPECT_THROW(parse_placement(text), UsageError) << text;
  for (const char* text : {"", "[R", "R]", "[R,]", "R R"}) EXPECT_THROW(parse_placements(text), UsageError) << text;
  try {
    parse_placement("Q");
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("'Q' is not a placement; write R, S(dim)"), std::string::npos) << e.what();
  }
}

TEST(Placement, NormalizeMakesDimsNonNegative) {
  Placements wild{Shard(-1), Partial(), StridedShard(-2, 2)};
  EXPECT_EQ(normalize(wild, 2), (Placements{Shard(1), Partial(), StridedShard(0, 2)}));
  EXPECT_THROW(normalize(Placements{Shard(2)}, 2), UsageError);
  EXPECT_THROW(normalize(Placements{Shard(-3)}, 2), UsageError);
  EXPECT_THROW(normalize(Placements{Shard(0)}, 0), UsageError);
  EXPECT_THROW(Shard(0, 0), UsageError);
  EXPECT_THROW(StridedShard(0, 0), UsageError);
}

TEST(Placement, Predicates) {
  EXPECT_TRUE(StridedShard(1, 2).is_sharded(1));
  EXPECT_FALSE(StridedShard(1, 2).is_shard(1));
  EXPECT_TRUE(MaskPartial().is_partial());
  EXPECT_FALSE(MaskPartial().is_partial(ReduceOp::Sum));
  EXPECT_EQ(Shard(1, 8).with_dim(0), Shard(0, 8));
  EXPECT_NE(Shard(0), StridedShard(0, 1));
}

TEST(Placement, ParsesWhatItPrintsAndHashesEqually) {
  EXPECT_TRUE(rc::check("parse(print(p)) == p", [&] {
    const auto a = testing::any_placement(), b = testing::any_placement();
    RC_ASSERT(parse_placement(to_string(a)) == a);
    RC_ASSERT(parse_placements(to_string(Placements{a, b})) == (Placements{a, b}));
    if (a == b) RC_ASSERT(a.hash() == b.hash());
    if (a.hash() == b.hash()) RC_ASSERT(a == b);
  }));
}

}  // namespace
}  // namespace tessera
