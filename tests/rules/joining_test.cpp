#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

TEST(JoiningRules, HoldByBruteForce) {
  auto list = [](std::vector<at::Tensor> tensors) { return c10::IValue(c10::List<at::Tensor>(tensors)); };
  expect_family_holds("joining",
                      {
                          {"aten::cat", {list({numbers({5, 3}), numbers({2, 3})}), 0}, {}},
                          {"aten::cat", {list({numbers({5, 3}), numbers({5, 1}), numbers({5, 4})}), -1}, {}},
                          {"aten::cat", {list({numbers({0}), numbers({5, 3})}), 1}, {}},
                          {"aten::cat", {list({numbers({3, 5}).t(), numbers({3, 5}).t()}), 0}, {}},
                          {"aten::cat",
                           {list({numbers({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
                                  numbers({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)}),
                            1},
                           {}},
                          {"aten::stack", {list({numbers({3, 5}).t(), numbers({3, 5}).t()}), 1}, {}},
                          {"aten::stack", {list({numbers({5, 3}), numbers({5, 3})}), 1}, {}},
                          {"aten::stack", {list({numbers({5, 3}), numbers({5, 3}), numbers({5, 3})}), 0}, {}},
                      });
}

}  // namespace
}  // namespace tessera::testing
