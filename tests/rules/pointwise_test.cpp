#include "tests/rules/family_test.h"

using namespace tessera;
using namespace tessera::testing;

TEST(PointwiseRules, HoldByBruteForce) { expect_family_holds("pointwise", samples_of_all("pointwise")); }
