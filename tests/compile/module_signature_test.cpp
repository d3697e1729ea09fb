// What a compiled module depends on: members of its own and of its submodules, numbers, captured tensors. Each case
// runs in eager mode and compiled, side by side.
#include "tessera/compile/api/compile.h"
#include "tessera/compile/api/compile_backward.h"
#include "tessera/testing/expect_error.h"

#include "captured_warnings.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

// Members of a module class of the user, which forward reads.
struct OwnMembersImpl : torch::nn::Module {
  bool doubled = false;  // in the padding after the members of torch::nn::Module
  float offset = 0;
  double scale = 0.5;
  std::string mode = "sum";
  std::vector<double> weights{0.5, 0.25};  // its elements are not in the object
  at::Tensor hidden;                       // is not registered
  at::Tensor apply(const at::Tensor& x) const {
    auto y = (x + offset) * scale * (doubled ? 2 : 1) * weights.back();
    if (hidden.defined()) y = y * hidden;
    return mode == "sum" ? y.sum() : y.mean();
  }
  at::Tensor forward(const at::Tensor& x) { return apply(x); }
};
TORCH_MODULE(OwnMembers);

// The same members in a submodule.
struct NestedMembersImpl : torch::nn::Module {
  NestedMembersImpl() {
    fc = register_module("fc", torch::nn::Linear(3, 3));
    inner = register_module("inner", OwnMembers());
  }
  at::Tensor forward(const at::Tensor& x) { return inner->apply(fc(x)); }
  torch::nn::Linear fc{nullptr};
  OwnMembers inner{nullptr};
};
TORCH_MODULE(NestedMembers);

struct MemberChange {
  const char* name;
  void (*change)(OwnMembersImpl& m);
};
const MemberChange kMemberChanges[] = {
    {"bool", [](OwnMembersImpl& m) { m.doubled = !m.doubled; }},
    {"float", [](OwnMembersImpl& m) { m.offset += 1; }},
    {"double", [](OwnMembersImpl& m) { m.scale += 1; }},
    {"short string", [](OwnMembersImpl& m) { m.mode = m.mode == "sum" ? "mean" : "sum"; }},
    {"tensor", [](OwnMembersImpl& m) { m.hidden = torch::full({3}, 1 + torch::rand({}).item<double>()); }},
};

OwnMembersImpl& members_of(OwnMembers& m) { return *m; }
OwnMembersImpl& members_of(NestedMembers& m) { return *m->inner; }

template <class Model>
void expect_members_are_guarded(bool as_module) {
  const CapturedWarnings quiet;
  for (const auto& each : kMemberChanges) {
    Model model;
    auto module = compile(model, {.codegen = false, .captures = Captures::None});
    auto step = compile([](Model& m, const at::Tensor& x) { return m(x).detach(); },
                        {.codegen = false, .captures = Captures::None});
    for (int call = 0; call < 4; call++) {
      if (call > 0) each.change(members_of(model));
      const auto x = torch::randn({2, 3});
      const auto found = as_module ? module(x) : step(model, x);
      EXPECT_TRUE(at::equal(found, model(x))) << each.name << ", call " << call;
    }
  }
}

TEST(CompileModule, MembersAreGuarded) { expect_members_are_guarded<OwnMembers>(true); }
TEST(CompileModule, MembersOfOwnSubmodulesAreGuarded) { expect_members_are_guarded<NestedMembers>(true); }
TEST(Signature, MembersOfAModuleAreGuarded) { expect_members_are_guarded<OwnMembers>(false); }
TEST(Signature, MembersOfOwnSubmodulesAreGuarded) { expect_members_are_guarded<NestedMembers>(false); }

// Elements of a vector are on the heap, where no guard sees them: the checks do, on calls 2, 4, 8.
template <class Model>
void expect_heap_members_are_checked() {
  for (const bool as_module : {true, false}) {
    Model model;
    auto module = compile(model, {.codegen = false});
    auto step = compile([](Model& m, const at::Tensor& x) { return m(x).detach(); }, {.codegen = false});
    const auto call = [&] { return as_module ? module(torch::ones({2, 3})) : step(model, torch::ones({2, 3})); };
    for (int i = 0; i < 3; i++) call();
    members_of(model).weights.back() = 3;
    EXPECT_ERROR(UsageError, call(), "has changed since", "0.25", "3");
  }
}
TEST(CompileModule, HeapMembersAreChecked) { expect_heap_members_are_checked<OwnMembers>(); }
TEST(CompileModule, HeapMembersOfSubmodulesAreChecked) { expect_heap_members_are_checked<NestedMembers>(); }

struct ScaledImpl : torch::nn::Module {
  ScaledImpl() { weight = register_parameter("weight", torch::randn({3})); }
  at::Tensor forward(const at::Tensor& x, double beta) { return (x * weight).tanh() * beta - weight * -beta; }
  at::Tensor weight;
};
TORCH_MODULE(Scaled);

TEST(CompileModule, HundredValuesOfANumberAreOneProgram) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  for (const bool codegen : {false, true}) {
    Scaled eager, model;
    model->weight.set_data(eager->weight.detach().clone());
    auto compiled = compile(model, {.codegen = codegen});
    for (int i = 0; i < 100; i++) {
      const auto x = torch::randn({2, 3});
      const auto wanted = eager(x, 0.5 - 0.1 * i), found = compiled(x, 0.5 - 0.1 * i);
      ASSERT_TRUE(at::equal(found, wanted)) << i;
      wanted.sum().backward();
      found.sum().backward();
      ASSERT_TRUE(at::equal(model->weight.grad(), eager->weight.grad())) << i;
    }
    EXPECT_EQ(compiled.cache().size(), 1u);
  }
}

// Each backward has the number of its own forward.
TEST(CompileModule, BackwardHasTheNumbersOfItsForward) {
  for (const bool compile_the_backward : {false, true}) {
    Scaled eager, model;
    model->weight.set_data(eager->weight.detach().clone());
    auto compiled = compile(model, {.codegen = false});
    for (int i = 0; i < 3; i++) {
      const auto x = torch::randn({2, 3});
      const auto a = eager(x, 0.5 + i), b = eager(x, 0.75 + i), c = compiled(x, 0.5 + i), d = compiled(x, 0.75 + i);
      for (const auto& [wanted, found] : {std::pair(a, c), std::pair(b, d)}) {
        wanted.sum().backward();
        if (compile_the_backward) {
          const auto scope = compile_backward({.codegen = false, .fullgraph = true});
          found.sum().backward();
        } else {
          found.sum().backward();
        }
        ASSERT_TRUE(at::equal(model->weight.grad(), eager->weight.grad())) << i << compile_the_backward;
      }
    }
  }
  reset_compile_caches();
}

// A parameter that the module does not register is trained as in eager mode.
struct UnregisteredImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight = torch::ones({3}, torch::requires_grad());
};
TORCH_MODULE(Unregistered);

TEST(CompileModule, LeavesThatAreNotRegisteredGetGradients) {
  Unregistered model;
  auto compiled = compile(model, {.codegen = false});
  for (int i = 1; i <= 3; i++) {
    compiled(torch::ones({3})).sum().backward();
    ASSERT_TRUE(model->weight.grad().defined());
    EXPECT_TRUE(at::equal(model->weight.grad(), torch::full({3}, static_cast<double>(i))));
  }
}

struct CarryImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    state = (x + state).detach();
    return state * 2;
  }
  at::Tensor state = torch::zeros({3});
};
TORCH_MODULE(Carry);

TEST(CompileModule, StateThatForwardAssignsIsRefused) {
  Carry model;
  auto compiled = compile(model, {.codegen = false});
  EXPECT_ERROR(UsageError, compiled(torch::ones({3})), "assigns a new tensor to a variable that its next call reads");
}

struct KeepImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    last = x.exp();
    return x * 2;
  }
  at::Tensor last;
};
TORCH_MODULE(Keep);

TEST(CompileModule, ATensorThatForwardKeepsIsRefused) {
  Keep model;
  auto compiled = compile(model, {.codegen = false});
  EXPECT_ERROR(UsageError, compiled(torch::ones({3})), "keeps a tensor of shape [3]");
}

double module_gain = 0.5;
struct ReadsGlobalImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * module_gain; }
  std::vector<double> any{1};
};
TORCH_MODULE(ReadsGlobal);

TEST(CompileModule, CheckOption) {
  ReadsGlobal model;
  auto compiled = compile(model, {.codegen = false, .check = 8});
  module_gain = 0.5;
  compiled(torch::ones({2}));
  compiled(torch::ones({2}));
  module_gain = 0.75;
  EXPECT_ERROR(UsageError, compiled(torch::ones({2})), "has changed since", "0.75");
}

// Numbers in the result of a module.
struct ReturnsNumbersImpl : torch::nn::Module {
  std::tuple<at::Tensor, double> forward(const at::Tensor& x, double beta) { return {x * beta, beta}; }
};
TORCH_MODULE(ReturnsNumbers);

TEST(CompileModule, NumbersInTheResult) {
  ReturnsNumbers model;
  auto compiled = compile(model, {.codegen = false});
  for (const double beta : {0.5, 0.75, 1.5}) {
    const auto [y, number] = compiled(torch::ones({2}), beta);
    EXPECT_EQ(number, beta);
    EXPECT_TRUE(at::equal(y, torch::full({2}, beta)));
  }
  EXPECT_EQ(compiled.cache().size(), 1u);
}

}  // namespace
}  // namespace tessera
