// In every test program: each test begins with the same random numbers, so that a run finds what the last one found.
#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace {

struct SeedEachTest : testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { at::manual_seed(1234); }
};

[[maybe_unused]] const bool added = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new SeedEachTest);  // gtest deletes it
  return true;
}();

}  // namespace
