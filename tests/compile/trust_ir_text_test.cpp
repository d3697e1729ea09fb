// Texts that are not programs: parse() refuses them with the line, verify() refuses programs that no step can have.
// tests/fuzz has the property for all texts.
#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/program.h"
#include "tessera/testing/expect_error.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

namespace tessera::compiler {
namespace {

struct RefusedText {
  std::string text, message;
};

TEST(TrustIrText, ParseRefusesWithTheLine) {
  const RefusedText cases[] = {
      {"input %0: f32[-1] argument \"x\"",
       "line 1, at \"argument \"x\"\": expected the sizes of a tensor: a size is -1"},
      {"input %0: f32[4611686018427387904, 4] argument \"x\"", "more than 2^63 bytes"},
      {"input %0: f32[0, 4611686018427387904, 4] argument \"x\"", "more than 2^63 bytes"},
      {"input %0: f32[2]{-1} argument \"x\"", "a stride is -1"},
      {"input %0: f32[3]{4611686018427387904} argument \"x\"", "its strides exceed 2^63"},
      {"input %0: f32[2]{1, 2} argument \"x\"", "1 sizes and 2 strides"},
      {"input %0: f32[2] cuda:300 argument \"x\"", "an integer from 0 to 127, not 300"},
      {"input %0: f32[2] batch -5 argument \"x\"", "an integer from 0 to"},
      {"%0: f32[2] in undefined = aten.relu(undefined)", "a value that has memory, not undefined"},
      {"input %0: f32[2]{1000000000} constant \"x\" = [1, 2]", "strides of at most"},
      {"input %0: i64[1] constant \"x\" = [9007199254740993]", "an integer below 2^53"},
      {"input %0: f32[2] argument \"x\" more", "the end of the line"},
      {"input %0: f32[2] argument \"x\\", "expected \"\"\""},
      {"group @a [0]\ngroup @a [1]", "line 2, at \"[1]\": expected a new name; a is already declared above"},
      {"group @a [0, 1] rank 2", "an integer from 0 to 1, not 2"},
      {"number $a\nnumber $a", "a is already declared above"},
      {"kernel f \"\"\nkernel f \"\"", "f is already declared above"},
      {"%0: f32[1] = aten.full(" + std::string(100'000, '['), "a list of at most 4 levels"},
  };
  for (const auto& each : cases) EXPECT_ERROR(UsageError, parse(each.text), each.message, std::string("line "));
}

TEST(TrustIrText, VerifyRefusesArgumentsThatDoNotMatchTheSchema) {
  const std::string x = "group @g [0, 1]\ninput %0: f32[4] argument \"x\"\n";
  const RefusedText cases[] = {
      {"%1: f32[4] = aten.relu(\"x\")", "argument self does not match the schema, aten::relu(Tensor self)"},
      {"%1: f32[4] = aten.view(%0, 4)", "argument size does not match"},
      {"%1: f32[4] = aten.view(%0, [\"a\"])", "argument size does not match"},
      {"%1: f32[4] = aten.view(%0, %0)", "argument size does not match"},
      {"%1: f32[4] = aten.view(%0, @g)", "argument size does not match"},
      {"[%1: f32[4]] = aten.relu(%0)", "result 0 does not match"},
      {"tessera.cpp_kernel([%0!], [], 3)", "argument name does not match"},
      {"%1: f32[4] = tessera.all_reduce(%0, @g, @g)", "argument op does not match"},
      {"%1: f32[8] = tessera.all_gather(%0, 0, [4], @g)", "1 tensors on 2 ranks have 1 dims and 1 shard sizes"},
      {"%1: f32[8] = tessera.all_gather(%0, 1, [4, 4], @g)", "dim 1 of a tensor of 1 dims"},
      {"%1: f32[8] = tessera.all_gather(%0, 0, [4, -4], @g)", "a shard size is -4"},
      {"%1: f32[4] in %0 + -1 = aten.view(%0, [4])", "%1 has offset -1"},
      {"%1: f32[4] in %0 + 9223372036854775807 = aten.view(%0, [4])", "%1 has offset 9223372036854775807"},
      {"%1: f32[4] batch 3 = aten.relu(%0)", "batch dim 3 of 1 dims"},
  };
  for (const auto& each : cases) EXPECT_ERROR(InternalError, verify(parse(x + each.text)), each.message, each.text);
  verify(parse(x + "%1: f32[4] = aten.dropout(%0, 1, false)"));  // an integer is a float where the schema has one
}

TEST(TrustIrText, PrintsWhatItParses) {
  for (const std::string text : {
           "input %0: f32[4] argument \"a\\nb\\\"c\\\\\"\nreturn %0 \"x\\ny\"\n",
           "input %0: i64[2] constant \"0\" = [-9007199254740991.0, 9007199254740991.0]\n",
           "input %0: f32[4] argument \"x\"\n%1: f32[4] = aten.relu(%0)  # net.0 # 1\n",
       })
    EXPECT_EQ(text_of(parse(text)), text);
  Program large;  // a double does not have this integer, so the text leaves it out
  large.inputs.push_back({large.add(Type::contiguous(c10::kLong, {1})), Role::Constant, "0",
                          at::tensor({int64_t{9007199254740993}}, at::kLong)});
  EXPECT_EQ(text_of(large), "input %0: i64[1] constant \"0\"\n");
}

}  // namespace
}  // namespace tessera::compiler
