#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/api/options.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

// For tests that run a step in eager mode and compiled, side by side.
namespace tessera::same_as_eager {

// Without generated kernels: no C++ compiler runs in these tests.
inline CompileOptions quick() { return {.codegen = false}; }

// Bitwise equal, with equal dtype, sizes and conj and neg bits; both may be undefined.
inline bool equal_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.is_conj() == b.is_conj() &&
         a.is_neg() == b.is_neg() && at::equal(a.detach(), b.detach());
}

inline void expect_equal_tensors(const Tensors& found, const Tensors& wanted, const std::string& what) {
  ASSERT_EQ(found.size(), wanted.size()) << what;
  for (size_t i = 0; i < found.size(); i++) EXPECT_TRUE(equal_bits(found[i], wanted[i])) << what << ", tensor " << i;
}

// Parameters, buffers and gradients.
inline Tensors tensors_of_module(const torch::nn::Module& module) {
  Tensors all;
  for (const auto& p : module.parameters()) {
    all.push_back(p.detach().clone());
    all.push_back(p.grad().defined() ? p.grad().detach().clone() : at::Tensor());
  }
  for (const auto& b : module.buffers()) all.push_back(b.clone());
  return all;
}

// The same, with what else is to be compared.
inline Tensors with_module(const Tensors& results, const torch::nn::Module& module) {
  auto all = tensors_of_module(module);
  all.insert(all.end(), results.begin(), results.end());
  return all;
}
inline Tensors with_module(const at::Tensor& result, const torch::nn::Module& module) {
  return with_module(Tensors{result}, module);
}

// Both sides of a comparison: `make(compiled)` builds everything anew from the same seed and returns a function from
// the number of the call to all tensors to compare. The random generator continues across the calls of each side.
template <class Make>
void expect_same_calls(const Make& make, int calls) {
  std::vector<Tensors> wanted;
  for (const bool compiled : {false, true}) {
    torch::manual_seed(11);
    auto call = make(compiled);
    for (int i = 0; i < calls; i++) {
      Tensors now;
      for (const auto& t : call(i)) now.push_back(t.defined() ? t.detach().clone() : t);
      if (!compiled)
        wanted.push_back(std::move(now));
      else
        expect_equal_tensors(now, wanted[static_cast<size_t>(i)], "call " + std::to_string(i));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// `step`, or the same step compiled.
template <class F>
auto as_is_or_compiled(F step, bool compiled, const CompileOptions& options = quick()) {
  auto program = std::make_shared<decltype(compile(step, options))>(compile(step, options));
  return [step, program, compiled](auto&&... args) mutable { return compiled ? (*program)(args...) : step(args...); };
}

}  // namespace tessera::same_as_eager
