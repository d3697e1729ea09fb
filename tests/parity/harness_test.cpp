#include "run_python.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>

namespace tessera::parity {
namespace {

TEST(Harness, SendsAndReceivesTensorsAndTexts) {
  setenv("LD_LIBRARY_PATH", "/nowhere", 1);  // the child must not inherit it
  const auto x = at::arange(6, at::kDouble).view({2, 3}).t();
  const Message request{{{"x", x}, {"flags", at::ones({2}, at::kBool)}}, {{"by", "3"}}};
  const auto response = run_python("harness_check.py", request);
  SKIP_WITHOUT_PYTHON(response);
  ASSERT_EQ(response.tensors.size(), 2U);
  EXPECT_TRUE(response.tensors.at("x").equal(x.mul(3)));
  EXPECT_TRUE(response.tensors.at("flags").equal(at::ones({2}, at::kBool)));
  EXPECT_EQ(response.texts.at("names"), "flags x");
  EXPECT_EQ(response.texts.at("environment"), "");  // no variable that could load our library
}

TEST(Harness, AFailedScriptThrowsItsOutput) {
  try {
    const auto response = run_python("no_such_script.py", {});
    SKIP_WITHOUT_PYTHON(response);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::parity
