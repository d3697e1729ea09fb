// What a caller sees of the tensors that a compiled function returns, besides their elements: whether they are
// inference tensors, which memory, version counter and base they share, and which of them are the argument itself.
#include "tessera/base/error.h"
#include "tessera/compile/api/compile.h"
#include "tessera/nn/modules.h"

#include "same_as_eager.h"

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <sstream>

namespace tessera {
namespace {

using same_as_eager::equal_bits;
using same_as_eager::quick;

struct ResultCase {
  const char* name;
  Tensors (*of)(const at::Tensor& x, const at::Tensor& other);
};

constexpr ResultCase kCases[] = {
    {"the argument", [](const at::Tensor& x, const at::Tensor&) { return Tensors{x}; }},
    {"the argument twice",
     [](const at::Tensor& x, const at::Tensor&) {
       return Tensors{x, x};
     }},
    {"both arguments",
     [](const at::Tensor& x, const at::Tensor& other) {
       return Tensors{other, x};
     }},
    {"a view", [](const at::Tensor& x, const at::Tensor&) { return Tensors{x.t()}; }},
    {"a view of a view", [](const at::Tensor& x, const at::Tensor&) { return Tensors{x.t().unsqueeze(0)}; }},
    {"detached", [](const at::Tensor& x, const at::Tensor&) { return Tensors{x.detach()}; }},
    {"data", [](const at::Tensor& x, const at::Tensor&) { return Tensors{x.variable_data()}; }},
    {"a view without elements",
     [](const at::Tensor& x, const at::Tensor& other) {
       return Tensors{x.narrow(0, 0, 0), other.narrow(1, 0, 0)};
     }},
    {"a view and its sum",
     [](const at::Tensor& x, const at::Tensor&) {
       return Tensors{x.flatten(), x.sum()};
     }},
    {"a new tensor and its view",
     [](const at::Tensor& x, const at::Tensor&) {
       auto y = x * 2;
       return Tensors{y, y.t()};
     }},
    {"parts of a new tensor",
     [](const at::Tensor& x, const at::Tensor&) {
       const auto y = x * 2;
       return Tensors{y.narrow(1, 0, 1), y.narrow(1, 1, 1)};
     }},
    {"made without the argument", [](const at::Tensor&, const at::Tensor&) { return Tensors{torch::ones({2})}; }},
    {"the argument, written",
     [](const at::Tensor& x, const at::Tensor&) {
       const at::NoGradGuard no_grad;
       x.add_(1);
       return Tensors{x, x.t()};
     }},
};

bool same_version(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_inference() || b.is_inference()) return a.is_inference() == b.is_inference();
  const auto before = a._version();
  b.unsafeGetTensorImpl()->bump_version();
  return a._version() != before;
}

// `views`: the tensor of which results are views is among them, or is the argument.
std::string describe(const Tensors& results, const at::Tensor& x, bool views) {
  std::ostringstream out;
  for (size_t i = 0; i < results.size(); i++) {
    const auto& t = results[i];
    out << i << (t.is_inference() ? " inference" : "") << (t.requires_grad() ? " requires grad" : "")
        << (t.is_same(x) ? " is the argument" : "") << (t.is_alias_of(x) ? " in its memory" : "")
        << (same_version(t, x) ? " with its version" : "")
        << (views && !t.is_inference() && t.is_view() ? " view" : "");
    for (size_t j = 0; j < i; j++)
      out << (t.is_same(results[j])       ? " same as "
              : t.is_alias_of(results[j]) ? " shares with "
                                          : " apart from ")
          << j << (same_version(t, results[j]) ? " versions" : "");
    out << "; ";
  }
  return out.str();
}

TEST(CompiledResults, AreWhatEagerReturns) {
  for (const auto& each : kCases)
    for (const char* mode : {"grad", "no grad", "inference"})
      for (const char* kind : {"plain", "of inference mode", "requires grad", "empty"})
        for (const int checked : {0, 2}) {
          const std::string_view m = mode, k = kind;
          const std::string_view name = each.name;
          if (k == "of inference mode" && (name == "data" || (m != "inference" && name.ends_with("written"))))
            continue;  // errors of eager mode
          auto options = quick();
          options.check = checked;
          auto step =
              compile([of = each.of](const at::Tensor& x, const at::Tensor& other) { return of(x, other); }, options);
          for (int call = 0; call < 4; call++) {
            std::string wanted, found;
            Tensors values;
            for (const bool compiled : {false, true}) {
              const auto make = [&](double value) {
                std::optional<c10::InferenceMode> in;
                if (k == "of inference mode") in.emplace();
                return torch::full({k == "empty" ? 0 : 2, 3}, value).requires_grad_(k == "requires grad");
              };
              const auto x = make(call), other = make(-call);
              std::optional<c10::InferenceMode> inference;
              if (m == "inference") inference.emplace();
              const at::AutoGradMode grad(m == "grad");
              auto results = compiled ? step(x, other) : each.of(x, other);
              if (!compiled)
                for (auto& t : results)
                  if (t.requires_grad()) t = t.detach();  // a compiled step returns tensors without a graph
              for (size_t i = 0; i < values.size(); i++) EXPECT_TRUE(equal_bits(results[i], values[i])) << each.name;
              values = results;
              (compiled ? found : wanted) = describe(results, x, !name.starts_with("parts"));
            }
            EXPECT_EQ(found, wanted) << each.name << ", " << mode << ", argument " << kind << ", call " << call;
          }
        }
}

// A write through a result is a write into the argument: autograd refuses a gradient that needs the old value.
TEST(CompiledResults, WritesAreSeenByAutograd) {
  auto step = compile([](const at::Tensor& x) { return x.view({-1}); }, quick());
  for (int call = 0; call < 4; call++) {
    const auto x = torch::randn({4});
    auto w = torch::randn({4}, torch::requires_grad());
    const auto y = step(x);
    auto loss = (y * w).sum();
    x.add_(1);
    EXPECT_THROW(loss.backward(), c10::Error) << call;
    step(x).mul_(w);
    EXPECT_TRUE(x.requires_grad()) << call;
  }
}

template <int which>
struct ViewsImpl : torch::nn::Module {
  Tensors forward(const at::Tensor& x) {
    const auto y = x * 2;
    if (which == 0) return {x.view({-1})};
    if (which == 1) return {x};
    if (which == 2) return {y, y.view({-1})};
    return {y.narrow(0, 0, 2), y.narrow(0, 2, 2)};
  }
};
template <int which>
struct Views : torch::nn::ModuleHolder<ViewsImpl<which>> {
  using torch::nn::ModuleHolder<ViewsImpl<which>>::ModuleHolder;
};

// In-place ops on results that share memory with the argument or with each other: equal gradients, or an error.
template <int which>
void expect_right_gradients() {
  const auto run = [](const auto& module, int write) -> std::optional<at::Tensor> {
    auto leaf = torch::arange(1, 5).to(torch::kFloat).requires_grad_();
    const auto x = leaf * 3;
    auto results = module(x);
    try {
      if (write == 0) results.back().mul_(5);
      if (write == 1) results.front().mul_(5);
      if (write == 2) x.mul_(5);
      auto loss = x.sum();
      for (const auto& t : results) loss = loss + t.pow(2).sum();
      loss.backward();
    } catch (const std::exception&) {
      return {};
    }
    return leaf.grad();
  };
  Views<which> module(std::make_shared<ViewsImpl<which>>());
  auto compiled = compile(module, quick());
  for (int write = 0; write < 4; write++)
    for (int call = 0; call < 2; call++) {
      const auto wanted = run([&](const at::Tensor& x) { return module->forward(x); }, write);
      const auto found = run([&](const at::Tensor& x) { return compiled(x); }, write);
      if (found)
        EXPECT_TRUE(wanted && equal_bits(*found, *wanted)) << which << ", write " << write << ", call " << call;
      else
        EXPECT_NE(write, 3) << which;
    }
}

TEST(CompiledResults, InPlaceOpsOnResultsOfModules) {
  expect_right_gradients<0>();
  expect_right_gradients<1>();
  expect_right_gradients<2>();
  expect_right_gradients<3>();
}

}  // namespace
}  // namespace tessera
