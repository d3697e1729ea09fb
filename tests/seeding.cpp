// Part of every test program: seeds LibTorch's generator before each test, so that runs are reproducible.
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
