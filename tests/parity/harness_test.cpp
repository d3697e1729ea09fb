#include "ask_python.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>

namespace tessera::parity {
namespace {

TEST(Harness, CarriesTensorsAndTextsBothWays) {
  setenv("LD_LIBRARY_PATH", "/nowhere", 1);  // must not reach the child
  const auto x = at::arange(6, at::kDouble).view({2, 3}).t();
  const auto answer = ask_python("harness_check.py", {{{"x", x}, {"flags", at::ones({2}, at::kBool)}}, {{"by", "3"}}});
  SKIP_UNLESS_ANSWERED(answer);
  ASSERT_EQ(answer.tensors.size(), 2U);
  EXPECT_TRUE(answer.tensors.at("x").equal(x.mul(3)));
  EXPECT_TRUE(answer.tensors.at("flags").equal(at::ones({2}, at::kBool)));
  EXPECT_EQ(answer.texts.at("said"), "flags x");
  EXPECT_EQ(answer.texts.at("environment"), "");  // of what could bring our library in
}

TEST(Harness, AScriptThatFailsIsHeard) {
  try {
    const auto answer = ask_python("no_such_script.py", {});
    SKIP_UNLESS_ANSWERED(answer);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::parity
