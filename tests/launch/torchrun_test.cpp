// Ranks started by PyTorch's torchrun --no-python, if installed.
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

std::string torchrun(const std::string& arguments) {
  return "\"" TESSERA_TORCH_PYTHON "\" -m torch.distributed.run --no-python --standalone " + arguments;
}

bool has_torchrun() {
  return std::string(TESSERA_TORCH_PYTHON) != "" &&
         shell("\"" TESSERA_TORCH_PYTHON
               "\" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec(\"torch\"))'")
                 .exit_code == 0;
}

TEST(Torchrun, RanksFormOneWorldAndTheErrorIsReported) {
  if (!has_torchrun()) GTEST_SKIP() << "no Python with torch, so no torchrun";
  const auto ran = shell(torchrun("--nproc-per-node 2 \"$PROBE\" catch 1"));
  EXPECT_CONTAINS(ran.text, "sum 3 on rank 0 of 2, 0 of 2 here");
  EXPECT_CONTAINS(ran.text, "sum 3 on rank 1 of 2, 1 of 2 here");
  EXPECT_EQ(ran.exit_code, 1);
  EXPECT_CONTAINS(ran.text, "Root Cause");
  EXPECT_CONTAINS(ran.text, "traceback : std::runtime_error: it \"broke\"");
}

}  // namespace
}  // namespace tessera::testing
