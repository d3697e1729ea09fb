#pragma once
#include "tessera/compile/detail/passes/pass.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/replay/interpret.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::compiler {

// A tensor for each input: different numbers, the same at each call.
inline Tensors inputs_for(const Program& program) {
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

// What a program puts out, and then its inputs, which it may have written to: op by op, and by replay.
inline Tensors interpreted(const Program& program) {
  const auto inputs = inputs_for(program);
  auto found = interpret(program, inputs);
  for (auto& t : found) t = t.clone();
  found.insert(found.end(), inputs.begin(), inputs.end());
  return found;
}
inline Tensors replayed(const Program& program) {
  const auto inputs = inputs_for(program);
  std::vector<c10::Storage> bound(static_cast<size_t>(program.buffers));
  for (size_t i = 0; i < inputs.size(); i++)
    bound[static_cast<size_t>(program.buffer_of(program.inputs[i].value))] = inputs[i].storage();
  Executable executable(program, bound);
  executable.run();
  Tensors found;
  for (const auto& output : program.outputs) found.push_back(executable.output(output).clone());
  found.insert(found.end(), inputs.begin(), inputs.end());
  return found;
}

// Does a program do what another does? Communication apart.
inline void expect_same(const Program& found, const Program& wanted) {
  const auto before = interpreted(wanted);
  for (const auto& after : {interpreted(found), replayed(found)}) {
    ASSERT_GE(after.size(), before.size());  // it may carry constants
    for (size_t i = 0; i < before.size(); i++)
      EXPECT_TRUE(at::allclose(after[i], before[i])) << i << ": " << after[i] << " and not " << before[i];
  }
}

// The text of a program after a pass, which must match. Without collectives it must also do what it did.
inline std::string after(const char* pass, const std::string& text) {
  auto program = parse(text);
  const auto before = program;
  verify(program);
  EXPECT_GT(find_pass(pass).run(program).times, 0);
  verify(program);
  if (program.groups.empty() && program.numbers.empty()) expect_same(program, before);
  renumber(program);
  verify(program);
  EXPECT_EQ(text_of(parse(text_of(program))), text_of(program));
  return text_of(program);
}
inline int64_t matches(const char* pass, const std::string& text) {
  auto program = parse(text);
  const auto times = find_pass(pass).run(program).times;
  verify(program);
  return times;
}

}  // namespace tessera::compiler
