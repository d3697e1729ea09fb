// Random steps, compiled with random passes, equal the same steps in eager mode. A step is a list of ops from a table
// with random operands, drawn while it runs on small tensors; a combination that an op rejects is not used. A failure
// prints the step, the passes and the seed. TESSERA_SOAK=1 draws twenty times as many. With Numerics::Fast they are
// close to eager mode instead of equal.
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"
#include "tessera/testing/detail/soak.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <random>
#include <sstream>

namespace tessera {
namespace {

using at::Tensor;

// One op of a step.
struct OpChoice {
  size_t op = 0;               // index in kOps
  size_t a = 0, b = 0, c = 0;  // operands: indices of values of the step
  int64_t m = 0, n = 0;        // dims, offsets
  double x = 0;
};

struct RandomOp {
  const char* name;
  Tensor (*run)(const Tensors& v, const OpChoice& k);  // undefined result: an in-place op
};

const Tensor& a(const Tensors& v, const OpChoice& k) { return v[k.a]; }
const Tensor& b(const Tensors& v, const OpChoice& k) { return v[k.b]; }
const Tensor& c(const Tensors& v, const OpChoice& k) { return v[k.c]; }
int64_t dim(const Tensor& t, int64_t n) { return t.dim() == 0 ? 0 : n % t.dim(); }
Tensor at_least_half(const Tensor& t) { return t.abs() + 0.5; }
Tensor half_of(const Tensor& t, const OpChoice& k) {
  const auto d = dim(t, k.m);
  return t.narrow(d, k.n % 2 * (t.size(d) / 2), (t.size(d) + 1) / 2);
}
// b, which must have the shape of a: a loss with broadcasting resizes its gradients in eager mode too.
const Tensor& b_of_same_shape(const Tensors& v, const OpChoice& k) {
  if (v[k.a].sizes() != v[k.b].sizes()) throw std::invalid_argument("different shapes");
  return v[k.b];
}
// Values 4 and 5 are the buffers of Data.
Tensor buffer_of(const Tensors& v, const OpChoice& k) { return v[k.a % 2 + 4]; }

// The table of ops: a, b and c are operands, k is the OpChoice.
#define OP(name, expression)                                  \
  {                                                           \
    name, [](const Tensors& v, const OpChoice& k) -> Tensor { \
      (void)v;                                                \
      (void)k;                                                \
      return expression;                                      \
    }                                                         \
  }
#define IN_PLACE_OP(name, expression)                         \
  {                                                           \
    name, [](const Tensors& v, const OpChoice& k) -> Tensor { \
      (void)k;                                                \
      expression;                                             \
      return {};                                              \
    }                                                         \
  }

const RandomOp kOps[] = {
    OP("add", a(v, k) + b(v, k)),
    OP("add number", a(v, k) + k.x),
    OP("add scaled", at::add(a(v, k), b(v, k), k.x)),
    OP("sub", a(v, k) - b(v, k)),
    OP("number sub", k.x - a(v, k)),
    OP("mul", a(v, k) * b(v, k)),
    OP("mul number", a(v, k) * k.x),
    OP("div", a(v, k) / at_least_half(b(v, k))),
    OP("div number", a(v, k) / 3),
    OP("neg", -a(v, k)),
    OP("relu", a(v, k).relu()),
    OP("gelu", at::gelu(a(v, k))),
    OP("silu", at::silu(a(v, k))),
    OP("tanh", a(v, k).tanh()),
    OP("sigmoid", a(v, k).sigmoid()),
    OP("exp", a(v, k).clamp(-3, 3).exp()),
    OP("sqrt", at_least_half(a(v, k)).sqrt()),
    OP("rsqrt", at_least_half(a(v, k)).rsqrt()),
    OP("square", a(v, k).pow(2)),
    OP("clamp", a(v, k).clamp(-0.7, 0.6)),
    OP("where", at::where(a(v, k) > b(v, k), a(v, k), c(v, k))),
    OP("masked_fill", a(v, k).masked_fill(a(v, k) > 0.3, k.x)),
    OP("maximum", at::maximum(a(v, k), b(v, k))),
    OP("addcmul", at::addcmul(a(v, k), b(v, k), c(v, k), k.x)),
    OP("lerp", at::lerp(a(v, k), b(v, k), 0.25)),
    OP("mm", at::mm(a(v, k), b(v, k))),
    OP("mm t", at::mm(a(v, k), b(v, k).t())),
    OP("matmul", at::matmul(a(v, k), b(v, k))),
    OP("linear", at::linear(a(v, k), b(v, k))),
    OP("addmm", at::addmm(c(v, k), a(v, k), b(v, k))),
    OP("softmax", at::softmax(a(v, k), dim(a(v, k), k.m))),
    OP("log_softmax", at::log_softmax(a(v, k), dim(a(v, k), k.m))),
    OP("layer_norm", at::layer_norm(a(v, k), {a(v, k).size(-1)})),
    OP("sum", a(v, k).sum(dim(a(v, k), k.m))),
    OP("sum keep", a(v, k).sum(dim(a(v, k), k.m), true)),
    OP("mean", a(v, k).mean(dim(a(v, k), k.m), true)),
    OP("sum all", a(v, k).sum()),
    OP("amax", a(v, k).amax(dim(a(v, k), k.m))),
    OP("cumsum", a(v, k).cumsum(dim(a(v, k), k.m))),
    OP("mse_loss", at::mse_loss(a(v, k), b_of_same_shape(v, k)) * 0.5),
    OP("smooth_l1_loss", at::smooth_l1_loss(a(v, k), b_of_same_shape(v, k)) * 0.5),
    OP("huber_loss", at::huber_loss(a(v, k), b_of_same_shape(v, k)) * 0.5),
    OP("var", a(v, k).var({dim(a(v, k), k.m)}, false)),
    OP("norm", at::linalg_vector_norm(a(v, k) + 2)),
    OP("t", a(v, k).t()),
    OP("transpose", a(v, k).transpose(dim(a(v, k), k.m), dim(a(v, k), k.n))),
    OP("flatten", a(v, k).flatten()),
    OP("view", a(v, k).view({2, -1})),
    OP("reshape", a(v, k).reshape({-1, 2})),
    OP("narrow", half_of(a(v, k), k)),
    OP("select", a(v, k).select(dim(a(v, k), k.m), 0)),
    OP("unsqueeze", a(v, k).unsqueeze(dim(a(v, k), k.m))),
    OP("squeeze", a(v, k).squeeze()),
    OP("expand", a(v, k).unsqueeze(0).expand({2, -1, -1})),
    OP("cat", at::cat({a(v, k), b(v, k)}, dim(a(v, k), k.m))),
    OP("stack", at::stack({a(v, k), a(v, k)})),
    OP("chunk", a(v, k).chunk(2, dim(a(v, k), k.m)).at(static_cast<size_t>(k.n % 2))),
    OP("clone", a(v, k).clone()),
    OP("contiguous", a(v, k).contiguous()),
    OP("detach", a(v, k).detach()),
    OP("double and back", a(v, k).to(at::kDouble).mul(1.5).to(at::kFloat)),
    OP("bf16 and back", a(v, k).to(at::kBFloat16).to(at::kFloat)),
    OP("zeros", at::zeros_like(a(v, k), at::TensorOptions())),
    OP("ones", at::ones_like(a(v, k), at::TensorOptions())),
    OP("full", at::full({3, 4}, k.x)),
    OP("arange", at::arange(4, at::kFloat)),
    OP("dropout", at::dropout(a(v, k), 0.4, true)),
    OP("eye", a(v, k) * at::eye(3, 3)),
    OP("tril", a(v, k).tril()),
    OP("index_select", a(v, k).index_select(0, at::arange(2, at::kLong))),
    OP("sort", std::get<0>(a(v, k).sort(dim(a(v, k), k.m)))),
    IN_PLACE_OP("add_", a(v, k).add_(b(v, k), k.x)),
    IN_PLACE_OP("mul_", a(v, k).mul_(b(v, k))),
    IN_PLACE_OP("relu_", a(v, k).relu_()),
    IN_PLACE_OP("sigmoid_", a(v, k).sigmoid_()),
    IN_PLACE_OP("zero_ half", half_of(a(v, k), k).zero_()),
    IN_PLACE_OP("copy_ half", half_of(a(v, k), k).copy_(b(v, k))),
    IN_PLACE_OP("fill_ half", half_of(a(v, k), k).fill_(k.x)),
    IN_PLACE_OP("buffer mul_", at::NoGradGuard no; buffer_of(v, k).mul_(0.9).add_(b(v, k).detach(), 0.1)),
    IN_PLACE_OP("buffer copy_", at::NoGradGuard no; buffer_of(v, k).copy_(b(v, k))),
    IN_PLACE_OP("buffer swap", at::NoGradGuard no; auto old = v[4].clone(); v[4].copy_(v[5]); v[5].copy_(old)),
};
#undef OP
#undef IN_PLACE_OP
constexpr size_t kOpCount = std::size(kOps);

// The first values of a step: two parameters, two inputs, two buffers.
struct Data {
  Tensors values;
  friend void tessera_visit(Data& data, auto&& field) {
    for (auto& t : data.values) field(t);
  }
  Data clone() const {
    Data other;
    const at::NoGradGuard no_grad;
    for (const auto& t : values) other.values.push_back(t.clone().requires_grad_(t.requires_grad()));
    return other;
  }
};

struct Step {
  std::vector<OpChoice> choices;
  bool keeps_gradients = false;

  // Returns the loss and the last value.
  Tensors operator()(Data& data) const {
    auto& p = data.values;
    if (!keeps_gradients)
      for (int i = 0; i < 2; i++) p[static_cast<size_t>(i)].mutable_grad().reset();
    Tensors v = p;
    for (const auto& choice : choices) {
      auto made = kOps[choice.op].run(v, choice);
      if (made.defined()) v.push_back(std::move(made));
    }
    auto loss = v[0].sum() * 0.5 + v[1].mean();
    for (size_t i = 6; i < v.size(); i += 2) loss = loss + v[i].mean();
    loss = loss + v.back().sum();
    loss.backward();
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 2; i++)
      if (p[static_cast<size_t>(i)].grad().defined())
        p[static_cast<size_t>(i)].sub_(p[static_cast<size_t>(i)].grad(), 0.05);
    return {loss.detach(), v.back().detach()};
  }
};

std::ostream& operator<<(std::ostream& out, const Step& step) {
  for (const auto& k : step.choices)
    out << "  " << kOps[k.op].name << " a=" << k.a << " b=" << k.b << " c=" << k.c << " m=" << k.m << " n=" << k.n
        << " x=" << k.x << "\n";
  return out << (step.keeps_gradients ? "  gradients accumulate\n" : "");
}

Data random_data(std::mt19937& random) {
  torch::manual_seed(random());
  Data data;
  data.values = {torch::randn({4, 3}, torch::requires_grad()),
                 torch::randn({3, 4}, torch::requires_grad()),
                 torch::randn({4, 4}),
                 torch::randn({3}),
                 torch::randn({4, 3}),
                 torch::randn({4, 3})};
  return data;
}

// Draws steps until one has a backward that works.
Step draw_step(std::mt19937& random, const Data& data) {
  const auto below = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  for (;;) {
    Step step;
    step.keeps_gradients = below(4) == 0;
    Tensors v = data.clone().values;
    const size_t wanted = 2 + below(12);
    for (int tries = 0; step.choices.size() < wanted && tries < 300; tries++) {
      const auto pick = [&] {
        return below(3) == 0 ? below(v.size()) : v.size() - 1 - below(std::min<size_t>(4, v.size()));
      };
      OpChoice choice{below(kOpCount),
                      pick(),
                      pick(),
                      pick(),
                      static_cast<int64_t>(below(3)),
                      static_cast<int64_t>(below(3)),
                      static_cast<double>(below(9)) * 0.25 - 1};
      try {
        auto made = kOps[choice.op].run(v, choice);
        if (made.defined() && (made.numel() == 0 || made.numel() > 512)) continue;
        if (made.defined()) v.push_back(std::move(made));
        step.choices.push_back(choice);
      } catch (const std::exception&) {
      }
    }
    try {
      auto trial = data.clone();
      for (int i = 0; i < 2; i++) step(trial);
      const bool has_history = std::any_of(trial.values.begin(), trial.values.end(), [](const Tensor& t) {
        return t.grad_fn() != nullptr;  // a value mutated with autograd: compile() rejects it
      });
      if (!has_history) return step;
    } catch (const std::exception&) {
    }
  }
}

// Passes that do not change any value, and that need no kernels.
PassList draw_passes(std::mt19937& random) {
  if (random() % 3 == 0) return compiler::default_passes();
  PassList passes;
  for (const auto& pass : compiler::known_passes()) {
    const bool is_for_codegen = pass.is_fast_only || std::string(pass.name) == "fuse_pointwise";
    if (!is_for_codegen && random() % 2 == 0) passes.emplace_back(pass.name);
  }
  if (random() % 4 == 0) std::shuffle(passes.begin(), passes.end(), random);
  return passes;
}

bool same_bits(const Tensor& x, const Tensor& y) {
  if (x.defined() != y.defined()) return false;
  if (!x.defined()) return true;
  return x.sizes() == y.sizes() && x.dtype() == y.dtype() && ((x == y) | (x.ne(x) & y.ne(y))).all().item<bool>();
}

// A step has up to 13 ops and updates its parameters three times: errors of one rounding grow.
bool is_close(const Tensor& x, const Tensor& y) {
  if (!x.defined() || !y.defined() || x.numel() == 0) return same_bits(x, y);
  if (x.sizes() != y.sizes() || x.dtype() != y.dtype()) return false;
  const auto largest = y.abs().nan_to_num(0, 0, 0).max().item<double>();
  return at::allclose(x, y, 0, 1e-5 + 1e-4 * largest, /*equal_nan=*/true);
}

using Compare = bool (*)(const Tensor&, const Tensor&);

std::string difference(const Tensors& found, const Tensors& wanted, const char* what, Compare same) {
  std::ostringstream out;
  for (size_t i = 0; i < wanted.size(); i++)
    if (!same(found[i], wanted[i]))
      out << what << " " << i << ":\n" << found[i] << "\ninstead of\n" << wanted[i] << "\n";
  return out.str();
}

Tensors gradients_of(const Data& data) { return {data.values[0].grad(), data.values[1].grad()}; }

// The first difference between eager and compiled; empty if they are equal.
std::string compare(const Step& step, const Data& data, const CompileOptions& options, uint32_t seed) {
  const bool fast = options.codegen.value_or(true) && options.numerics == Numerics::Fast;
  const Compare same = fast ? is_close : same_bits;
  auto eager = data.clone(), compiled = data.clone();
  auto replayed = compile([&](Data& d) { return step(d); }, options);
  for (int call = 0; call < 3; call++) {
    torch::manual_seed(seed + static_cast<uint32_t>(call));
    const auto wanted = step(eager);
    torch::manual_seed(seed + static_cast<uint32_t>(call));
    const auto found = replayed(compiled);
    const auto text = difference(found, wanted, "returned", same) +
                      difference(compiled.values, eager.values, "memory", same) +
                      difference(gradients_of(compiled), gradients_of(eager), "gradient", same);
    if (!text.empty()) return c10::str("call ", call, ": ", text);
  }
  return "";
}

// Suppresses the warnings about passes that match nothing. A warning that a kernel resized an output is a failure: the
// memory plan was wrong.
struct ResizeWarnings : c10::WarningHandler {
  std::string resized;
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("was resized") != std::string::npos) resized = warning.msg();
  }
};

void compare_random_steps(uint32_t from, uint32_t count, bool codegen, Numerics numerics = Numerics::Strict) {
  ResizeWarnings warnings;
  const c10::WarningUtils::WarningHandlerGuard capture(&warnings);
  for (uint32_t seed = from; seed < from + count; seed++) {
    std::mt19937 random(seed);
    const auto data = random_data(random);
    const auto step = draw_step(random, data);
    const auto passes = draw_passes(random);
    std::string found;
    try {
      found =
          compare(step, data, {.passes = passes, .codegen = codegen, .verified = true, .numerics = numerics}, seed) +
          std::exchange(warnings.resized, "");
    } catch (const std::exception& error) {
      found = error.what();
    }
    if (found.empty()) continue;
    std::ostringstream names;
    for (const auto& pass : passes) names << " " << pass.name;
    ADD_FAILURE() << "seed " << seed << ", passes" << names.str() << "\n" << step << found;
    return;
  }
}

// The same steps on DTensors with random placements: the program has collectives, and passes move them.
// A step that eager mode rejects on them, or that draws from the generator that ranks as threads share, is not used.
std::string compare_on_ranks(const Step& step, const Data& data, const PassList& passes, const DeviceMesh& mesh,
                             uint32_t seed, int& used) {
  std::mt19937 random(seed);
  const ImplicitReplication plain_is_replicated;
  Data start;
  for (const auto& t : data.values) {
    const auto d = static_cast<int64_t>(random() % static_cast<unsigned>(t.dim() + 1));
    const at::NoGradGuard no_grad;
    Tensor x = distribute_tensor(t.clone(), mesh, {d == t.dim() ? Placement(Replicate()) : Placement(Shard(d))});
    start.values.push_back(x.requires_grad_(t.requires_grad()));
  }
  for (const auto& choice : step.choices)
    if (std::string(kOps[choice.op].name) == "dropout") return "";
  try {
    auto trial = start.clone();
    for (int i = 0; i < 2; i++) step(trial);
  } catch (const std::exception&) {
    return "";
  }
  used++;
  auto eager = start.clone(), compiled = start.clone();
  auto replayed = compile(
      [&](Data& d) {
        const ImplicitReplication replicated;
        return step(d);
      },
      {.passes = passes, .codegen = false, .verified = true, .captures = Captures::None});
  const auto full = [](Tensors tensors) {
    for (auto& t : tensors)
      if (t.defined()) t = t.detach();
    for (auto& t : tensors)
      if (t.defined() && is_dtensor(t)) t = DTensor(t).full_tensor();
    return tensors;
  };
  for (int call = 0; call < 3; call++) {
    const auto wanted = step(eager), found = replayed(compiled);
    const auto text = difference(full(found), full(wanted), "returned", same_bits) +
                      difference(full(compiled.values), full(eager.values), "memory", same_bits) +
                      difference(full(gradients_of(compiled)), full(gradients_of(eager)), "gradient", same_bits);
    if (!text.empty()) return c10::str("call ", call, ": ", text, replayed.listing());
  }
  return "";
}

void compare_random_steps_on_ranks(uint32_t from, uint32_t count) {
  for (uint32_t seed = from; seed < from + count; seed += 50) {
    std::vector<Data> data;
    std::vector<Step> steps;
    std::vector<PassList> passes;
    for (uint32_t i = 0; i < 50; i++) {
      std::mt19937 random(seed + i);
      data.push_back(random_data(random));
      steps.push_back(draw_step(random, data.back()));
      passes.push_back(draw_passes(random));
      std::erase_if(passes.back(), [](const auto& pass) { return pass.name == "place_redistributes"; });  // rounds
    }
    std::atomic<int> all_used = 0;
    testing::run_ranks(2, [&](testing::Rank& me) {
      ResizeWarnings warnings;
      const c10::WarningUtils::WarningHandlerGuard capture(&warnings);
      const auto mesh = init_device_mesh("cpu", {2}, {"x"});
      int used = 0;
      for (uint32_t i = 0; i < 50; i++) {
        std::string found;
        try {
          found = compare_on_ranks(steps[i], data[i], passes[i], mesh, seed + i, used);
        } catch (const std::exception& error) {
          found = error.what();
        }
        if (found.empty()) continue;
        std::ostringstream names;
        for (const auto& pass : passes[i]) names << " " << pass.name;
        ADD_FAILURE() << "rank " << me.rank << ", seed " << seed + i << ", passes" << names.str() << "\n"
                      << steps[i] << found;
        return;
      }
      all_used += used;
    });
    if (::testing::Test::HasFailure()) return;
    EXPECT_GE(all_used, 50) << "of 100";
  }
}

const uint32_t kTimes = testing::long_soak() ? 20 : 1;

TEST(RandomSteps, EqualEager) { compare_random_steps(1, 1980 * kTimes, false); }
TEST(RandomSteps, EqualEagerOnRanks) { compare_random_steps_on_ranks(3'000'001, 100 * kTimes); }
TEST(RandomSteps, EqualEagerWithGeneratedKernels) { compare_random_steps(1'000'001, 25 * kTimes, true); }
TEST(RandomSteps, AreCloseToEagerWithFastNumerics) {
  compare_random_steps(2'000'001, 25 * kTimes, true, Numerics::Fast);
}

}  // namespace
}  // namespace tessera
