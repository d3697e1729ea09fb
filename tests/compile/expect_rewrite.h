#pragma once
#include "tessera/compile/detail/passes/pass.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/replay/interpret.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

// Tests of a pass by text: the program before, the program after.
namespace tessera::compiler {

// One tensor per input of the program, with values that are the same in each call.
inline Tensors example_inputs(const Program& program) {
  Tensors inputs;
  for (const auto& input : program.inputs) {
    const auto& type = program[input.value].type;
    auto t = torch::empty_strided(type.sizes, type.strides, type.dtype);
    const auto first = static_cast<int64_t>(inputs.size());
    t.copy_(torch::arange(first, first + t.numel()).reshape(t.sizes()).remainder(7) - 3);
    inputs.push_back(input.constant.defined() ? input.constant : t);
  }
  return inputs;
}

// An executable whose inputs are these tensors.
inline std::unique_ptr<Executable> executable_for(const Program& program, const Tensors& inputs) {
  std::vector<c10::Storage> bound(static_cast<size_t>(program.buffers));
  for (size_t i = 0; i < inputs.size(); i++)
    bound[static_cast<size_t>(program.buffer_of(program.inputs[i].value))] = inputs[i].storage();
  return std::make_unique<Executable>(program, bound);
}
inline Tensors outputs_of(const Executable& executable) {
  Tensors outputs;
  for (const auto& output : executable.program().outputs) outputs.push_back(executable.output(output));
  return outputs;
}
inline Tensors clones(const Tensors& tensors) {
  Tensors copies;
  for (const auto& t : tensors) copies.push_back(t.clone());
  return copies;
}

// The outputs of a program, then its inputs, which it may have mutated.
inline Tensors interpreted(const Program& program) {
  const auto inputs = example_inputs(program);
  auto tensors = clones(interpret(program, inputs));
  tensors.insert(tensors.end(), inputs.begin(), inputs.end());
  return tensors;
}
inline Tensors replayed(const Program& program) {
  const auto inputs = example_inputs(program);
  const auto executable = executable_for(program, inputs);
  executable->run();
  auto tensors = clones(outputs_of(*executable));
  tensors.insert(tensors.end(), inputs.begin(), inputs.end());
  return tensors;
}

// Both programs compute the same values. `found` may have additional inputs, which are constants.
inline void expect_same_values(const Program& found, const Program& wanted) {
  const auto before = interpreted(wanted);
  for (const auto& after : {interpreted(found), replayed(found)}) {
    ASSERT_GE(after.size(), before.size());
    for (size_t i = 0; i < before.size(); i++)
      EXPECT_TRUE(at::allclose(after[i], before[i])) << i << ": " << after[i] << " and not " << before[i];
  }
}

inline bool runs_here(const Program& program) {
  return program.groups.empty() && program.numbers.empty() &&
         std::all_of(program.values.begin(), program.values.end(),
                     [](const Value& v) { return v.type.device.is_cpu(); });
}

// The pass rewrites `before` to `after`. A program on the CPU without collectives and runtime scalars is also run: the
// pass must not change its values.
inline void expect_rewrite(const char* pass, const std::string& before, const std::string& after) {
  auto program = parse(before);
  const auto original = program;
  verify(program);
  EXPECT_GT(find_pass(pass).run(program).times, 0) << pass;
  verify(program);
  if (runs_here(program)) expect_same_values(program, original);
  renumber(program);
  verify(program);
  EXPECT_EQ(text_of(program), after);
  EXPECT_EQ(text_of(parse(text_of(program))), text_of(program));
}

// The program after the pass.
inline std::string rewritten(const char* pass, const std::string& text) {
  auto program = parse(text);
  find_pass(pass).run(program);
  verify(program);
  return text_of(program);
}

// How often the pass matches.
inline int64_t matches(const char* pass, const std::string& text) {
  auto program = parse(text);
  const auto times = find_pass(pass).run(program).times;
  verify(program);
  return times;
}

}  // namespace tessera::compiler
