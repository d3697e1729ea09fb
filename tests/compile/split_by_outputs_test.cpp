// The backward of two linear layers, split into the gradient of the input and those of the weights.
#include "tessera/compile/detail/ir/split_by_outputs.h"

#include "expect_rewrite.h"
#include "tessera/compile/api/compile.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/module_tree.h"
#include "train_step.h"

namespace tessera {
namespace {

using compiler::Program;
using compiler::SplitProgram;

// %0: dy, %1: w1, %2: w2, %3: x, %4: h
constexpr const char* kTwoLinears = R"(input %0: f32[4, 4] gradient "output 0"
input %1: f32[4, 4] parameter "w1"
input %2: f32[4, 4] parameter "w2"
input %3: f32[4, 4] argument "0"
input %4: f32[4, 4] captured "saved"
%5: f32[4, 4]{1, 4} in %4 = aten.t(%4)
%6: f32[4, 4] = aten.mm(%5, %0)
%7: f32[4, 4] = aten.mm(%0, %2)
%8: f32[4, 4]{1, 4} in %3 = aten.t(%3)
%9: f32[4, 4] = aten.mm(%8, %7)
%10: f32[4, 4] = aten.mm(%7, %1)
return %9
return %6
return %10
)";

std::vector<std::string> ops_of(const Program& program) {
  std::vector<std::string> names;
  for (const auto& node : program.nodes) names.push_back(node.name());
  return names;
}

TEST(SplitByOutputs, EachPartHasTheOpsOfItsOutputs) {
  const Program program = compiler::parse(kTwoLinears);
  const SplitProgram parts = compiler::split_by_outputs(program, {0, 0, 1});
  EXPECT_EQ(ops_of(parts.first), (std::vector<std::string>{"aten.mm", "aten.mm"}));
  EXPECT_EQ(ops_of(parts.second), (std::vector<std::string>{"aten.t", "aten.mm", "aten.t", "aten.mm"}));
  EXPECT_EQ(parts.first_outputs, 1u);
  EXPECT_EQ(parts.saved.size(), 1u);  // dh
  EXPECT_EQ(parts.second.outputs.size(), 2u);
  for (const Program& part : {parts.first, parts.second}) compiler::verify(part);

  const auto joint = compiler::interpreted(program);
  const auto inputs = compiler::example_inputs(program);
  const auto inputs_of = [&](const Program& part, const Tensors& saved) {
    Tensors found;
    for (const auto& input : part.inputs) {
      if (input.name == "saved" && program.buffer_of(input.value) == parts.saved[0]) {
        found.push_back(saved[1]);
        continue;
      }
      for (size_t i = 0; i < inputs.size(); i++)
        if (program.inputs[i].value == input.value) found.push_back(inputs[i]);
    }
    return found;
  };
  const auto first = compiler::interpret(parts.first, inputs_of(parts.first, {}));
  const auto second = compiler::interpret(parts.second, inputs_of(parts.second, first));
  EXPECT_TRUE(first[0].equal(joint[2]));
  EXPECT_TRUE(second[0].equal(joint[0]));
  EXPECT_TRUE(second[1].equal(joint[1]));
}

// The result is written in place after another op has read it: that op comes first. An all-reduce of the second output
// precedes one of the first on the same group, so it stays before it, with its wait.
TEST(SplitByOutputs, KeepsTheOrderOfWritesAndCollectives) {
  const SplitProgram in_place = compiler::split_by_outputs(compiler::parse(R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = aten.exp(%1)
%3: f32[4] in %1 = aten.relu_(%1!)
%4: f32[4] = aten.exp(%2)
return %3
return %4
)"),
                                                           {1, 0});
  EXPECT_EQ(ops_of(in_place.first), (std::vector<std::string>{"aten.neg", "aten.exp", "aten.relu_"}));
  EXPECT_EQ(ops_of(in_place.second), std::vector<std::string>{"aten.exp"});

  const SplitProgram collectives = compiler::split_by_outputs(compiler::parse(R"(group @tp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = tessera.all_reduce(%0, "sum", @tp)
%2: f32[4] = aten.neg(%0)
%3: f32[4] = tessera.all_reduce(%2, "sum", @tp)
%4: f32[4] in %3 = tessera.wait(%3!, @tp)
%5: f32[4] in %1 = tessera.wait(%1!, @tp)
%6: f32[4] = aten.exp(%5)
return %6
return %4
)"),
                                                              {0, 1});
  EXPECT_EQ(ops_of(collectives.first), (std::vector<std::string>{"tessera.all_reduce", "aten.neg", "tessera.all_reduce",
                                                                 "tessera.wait", "tessera.wait"}));
  EXPECT_EQ(ops_of(collectives.second), std::vector<std::string>{"aten.exp"});
}

// Counts the runs of each program of a compiled module.
struct ProgramRuns {
  std::vector<int64_t> runs;
  CompileOptions options() {
    return {.codegen = false,
            .run_with =
                [this](const Program& program) {
                  const size_t index = runs.size();
                  runs.push_back(0);
                  return [this, index, program](const Tensors& inputs) {
                    ++runs[index];
                    return compiler::interpret(program, inputs);
                  };
                },
            .captures = Captures::None,
            .split_backward = true};
  }
};

TEST(SplitBackward, RunsThePartThatABackwardNeeds) {
  const models::MLP start(models::mlp_module());
  auto eager = clone(start), model = clone(start);
  ProgramRuns counted;
  auto compiled = compile(model, counted.options());
  const auto x = torch::randn({8, 10}, torch::requires_grad());
  const auto dy = torch::randn_like(eager(x));
  const auto parameters = eager->parameters(), own = model->parameters();
  const auto wanted_input = torch::autograd::grad({eager(x)}, {x}, {dy})[0];
  const auto wanted = torch::autograd::grad({eager(x)}, parameters, {dy});
  const auto wanted_of_twice = torch::autograd::grad({eager(x)}, parameters, {2 * dy});
  const auto expect_equal = [](const Tensors& found, const Tensors& expected) {
    for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(found[i].equal(expected[i])) << i;
  };

  const auto y = compiled(x);
  EXPECT_EQ(counted.runs.size(), 3u);
  counted.runs.assign(3, 0);
  const auto grad = [&](const Tensors& of, const at::Tensor& gradient) {
    return torch::autograd::grad({y}, of, {gradient}, /*retain_graph=*/true);
  };
  const auto total = [&] { return counted.runs[0] + counted.runs[1] + counted.runs[2]; };
  expect_equal(grad({x}, dy), {wanted_input});
  EXPECT_EQ(total(), 1);
  expect_equal(grad(own, dy), wanted);  // the first part is not run again
  EXPECT_EQ(total(), 2);
  expect_equal(grad({x}, dy), {wanted_input});
  expect_equal(grad(own, 2 * dy), wanted_of_twice);  // other gradients: both parts
  EXPECT_EQ(total(), 5);
  auto changed = dy.clone();
  expect_equal(grad({x}, changed), {wanted_input});
  changed.mul_(2);
  expect_equal(grad(own, changed), wanted_of_twice);  // changed in place
  EXPECT_EQ(total(), 8);
  Tensors all = own;
  all.push_back(x);
  Tensors wanted_all = wanted;
  wanted_all.push_back(wanted_input);
  expect_equal(grad(all, dy), wanted_all);
  EXPECT_EQ(total(), 10);
}

}  // namespace
}  // namespace tessera
