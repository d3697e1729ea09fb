// Random steps, compiled with random passes, against the same steps run eagerly. A step is a list of choices from a
// table of ops, made while it runs on small tensors: a choice that an op refuses is not taken. Failures print the step,
// the passes and the number to draw it again with. TESSERA_SOAK=1 draws twenty times as many.
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/detail/soak.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>
#include <sstream>

namespace tessera {
namespace {

using at::Tensor;

struct Choice {
  size_t row = 0;
  size_t a = 0, b = 0, c = 0;  // operands, by their number in the step
  int64_t m = 0, n = 0;        // dims, places
  double x = 0;
};

struct Row {
  const char* name;
  Tensor (*run)(const Tensors& v, const Choice& k);  // an undefined result: it only wrote
};

const Tensor& a(const Tensors& v, const Choice& k) { return v[k.a]; }
const Tensor& b(const Tensors& v, const Choice& k) { return v[k.b]; }
const Tensor& c(const Tensors& v, const Choice& k) { return v[k.c]; }
int64_t dim(const Tensor& t, int64_t n) { return t.dim() == 0 ? 0 : n % t.dim(); }
Tensor at_least_half(const Tensor& t) { return t.abs() + 0.5; }
Tensor half_of(const Tensor& t, const Choice& k) {
  const auto d = dim(t, k.m);
  return t.narrow(d, k.n % 2 * (t.size(d) / 2), (t.size(d) + 1) / 2);
}
// b, if it has the shape of a: losses of others resize their gradients, eagerly too.
const Tensor& alike(const Tensors& v, const Choice& k) {
  if (v[k.a].sizes() != v[k.b].sizes()) throw std::invalid_argument("other shapes");
  return v[k.b];
}
Tensor buffer_of(const Tensors& v, const Choice& k) { return v[k.a % 2 + 4]; }  // see Data

// Short names make the rows a table: a, b, c are operands.
#define ROW(name, expression)                               \
  {                                                         \
    name, [](const Tensors& v, const Choice& k) -> Tensor { \
      (void)v;                                              \
      (void)k;                                              \
      return expression;                                    \
    }                                                       \
  }
#define WRITE(name, expression)                             \
  {                                                         \
    name, [](const Tensors& v, const Choice& k) -> Tensor { \
      (void)k;                                              \
      expression;                                           \
      return {};                                            \
    }                                                       \
  }

const Row kRows[] = {
    ROW("add", a(v, k) + b(v, k)),
    ROW("add number", a(v, k) + k.x),
    ROW("add scaled", at::add(a(v, k), b(v, k), k.x)),
    ROW("sub", a(v, k) - b(v, k)),
    ROW("number sub", k.x - a(v, k)),
    ROW("mul", a(v, k) * b(v, k)),
    ROW("mul number", a(v, k) * k.x),
    ROW("div", a(v, k) / at_least_half(b(v, k))),
    ROW("div number", a(v, k) / 3),
    ROW("neg", -a(v, k)),
    ROW("relu", a(v, k).relu()),
    ROW("gelu", at::gelu(a(v, k))),
    ROW("silu", at::silu(a(v, k))),
    ROW("tanh", a(v, k).tanh()),
    ROW("sigmoid", a(v, k).sigmoid()),
    ROW("exp", a(v, k).clamp(-3, 3).exp()),
    ROW("sqrt", at_least_half(a(v, k)).sqrt()),
    ROW("rsqrt", at_least_half(a(v, k)).rsqrt()),
    ROW("square", a(v, k).pow(2)),
    ROW("clamp", a(v, k).clamp(-0.7, 0.6)),
    ROW("where", at::where(a(v, k) > b(v, k), a(v, k), c(v, k))),
    ROW("masked_fill", a(v, k).masked_fill(a(v, k) > 0.3, k.x)),
    ROW("maximum", at::maximum(a(v, k), b(v, k))),
    ROW("addcmul", at::addcmul(a(v, k), b(v, k), c(v, k), k.x)),
    ROW("lerp", at::lerp(a(v, k), b(v, k), 0.25)),
    ROW("mm", at::mm(a(v, k), b(v, k))),
    ROW("mm t", at::mm(a(v, k), b(v, k).t())),
    ROW("matmul", at::matmul(a(v, k), b(v, k))),
    ROW("linear", at::linear(a(v, k), b(v, k))),
    ROW("addmm", at::addmm(c(v, k), a(v, k), b(v, k))),
    ROW("softmax", at::softmax(a(v, k), dim(a(v, k), k.m))),
    ROW("log_softmax", at::log_softmax(a(v, k), dim(a(v, k), k.m))),
    ROW("layer_norm", at::layer_norm(a(v, k), {a(v, k).size(-1)})),
    ROW("sum", a(v, k).sum(dim(a(v, k), k.m))),
    ROW("sum keep", a(v, k).sum(dim(a(v, k), k.m), true)),
    ROW("mean", a(v, k).mean(dim(a(v, k), k.m), true)),
    ROW("sum all", a(v, k).sum()),
    ROW("amax", a(v, k).amax(dim(a(v, k), k.m))),
    ROW("cumsum", a(v, k).cumsum(dim(a(v, k), k.m))),
    ROW("mse_loss", at::mse_loss(a(v, k), alike(v, k)) * 0.5),
    ROW("smooth_l1_loss", at::smooth_l1_loss(a(v, k), alike(v, k)) * 0.5),
    ROW("huber_loss", at::huber_loss(a(v, k), alike(v, k)) * 0.5),
    ROW("var", a(v, k).var({dim(a(v, k), k.m)}, false)),
    ROW("norm", at::linalg_vector_norm(a(v, k) + 2)),
    ROW("t", a(v, k).t()),
    ROW("transpose", a(v, k).transpose(dim(a(v, k), k.m), dim(a(v, k), k.n))),
    ROW("flatten", a(v, k).flatten()),
    ROW("view", a(v, k).view({2, -1})),
    ROW("reshape", a(v, k).reshape({-1, 2})),
    ROW("narrow", half_of(a(v, k), k)),
    ROW("select", a(v, k).select(dim(a(v, k), k.m), 0)),
    ROW("unsqueeze", a(v, k).unsqueeze(dim(a(v, k), k.m))),
    ROW("squeeze", a(v, k).squeeze()),
    ROW("expand", a(v, k).unsqueeze(0).expand({2, -1, -1})),
    ROW("cat", at::cat({a(v, k), b(v, k)}, dim(a(v, k), k.m))),
    ROW("stack", at::stack({a(v, k), a(v, k)})),
    ROW("chunk", a(v, k).chunk(2, dim(a(v, k), k.m)).at(static_cast<size_t>(k.n % 2))),
    ROW("clone", a(v, k).clone()),
    ROW("contiguous", a(v, k).contiguous()),
    ROW("detach", a(v, k).detach()),
    ROW("double and back", a(v, k).to(at::kDouble).mul(1.5).to(at::kFloat)),
    ROW("bf16 and back", a(v, k).to(at::kBFloat16).to(at::kFloat)),
    ROW("zeros", at::zeros_like(a(v, k), at::TensorOptions())),
    ROW("ones", at::ones_like(a(v, k), at::TensorOptions())),
    ROW("full", at::full({3, 4}, k.x)),
    ROW("arange", at::arange(4, at::kFloat)),
    ROW("dropout", at::dropout(a(v, k), 0.4, true)),
    ROW("eye", a(v, k) * at::eye(3, 3)),
    ROW("tril", a(v, k).tril()),
    ROW("index_select", a(v, k).index_select(0, at::arange(2, at::kLong))),
    ROW("sort", std::get<0>(a(v, k).sort(dim(a(v, k), k.m)))),
    WRITE("add_", a(v, k).add_(b(v, k), k.x)),
    WRITE("mul_", a(v, k).mul_(b(v, k))),
    WRITE("relu_", a(v, k).relu_()),
    WRITE("sigmoid_", a(v, k).sigmoid_()),
    WRITE("zero_ half", half_of(a(v, k), k).zero_()),
    WRITE("copy_ half", half_of(a(v, k), k).copy_(b(v, k))),
    WRITE("fill_ half", half_of(a(v, k), k).fill_(k.x)),
    WRITE("buffer mul_", at::NoGradGuard no; buffer_of(v, k).mul_(0.9).add_(b(v, k).detach(), 0.1)),
    WRITE("buffer copy_", at::NoGradGuard no; buffer_of(v, k).copy_(b(v, k))),
    WRITE("buffer swap", at::NoGradGuard no; auto old = v[4].clone(); v[4].copy_(v[5]); v[5].copy_(old)),
};
#undef ROW
#undef WRITE
constexpr size_t kCount = std::size(kRows);

// What a step begins with: two parameters, two inputs, two buffers.
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
  std::vector<Choice> choices;
  bool keeps_gradients = false;

  // What it returns: the loss, the last value.
  Tensors operator()(Data& data) const {
    auto& p = data.values;
    if (!keeps_gradients)
      for (int i = 0; i < 2; i++) p[static_cast<size_t>(i)].mutable_grad().reset();
    Tensors v = p;
    for (const auto& choice : choices) {
      auto made = kRows[choice.row].run(v, choice);
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
    out << "  " << kRows[k.row].name << " a=" << k.a << " b=" << k.b << " c=" << k.c << " m=" << k.m << " n=" << k.n
        << " x=" << k.x << "\n";
  return out << (step.keeps_gradients ? "  gradients are kept\n" : "");
}

Data start(std::mt19937& random) {
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

// Draws until a step has that many ops and a backward that works.
Step draw(std::mt19937& random, const Data& data) {
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
      Choice choice{below(kCount),
                    pick(),
                    pick(),
                    pick(),
                    static_cast<int64_t>(below(3)),
                    static_cast<int64_t>(below(3)),
                    static_cast<double>(below(9)) * 0.25 - 1};
      try {
        auto made = kRows[choice.row].run(v, choice);
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
        return t.grad_fn() != nullptr;  // written to: the next step's graph would hang on this one's
      });
      if (!has_history) return step;
    } catch (const std::exception&) {
    }
  }
}

// Passes that change no bits.
PassList draw_passes(std::mt19937& random) {
  if (random() % 3 == 0) return compiler::default_passes();
  PassList passes;
  for (const auto& row : compiler::known_passes())
    if (random() % 2 == 0 && std::string(row.name) != "fuse_pointwise") passes.emplace_back(row.name);
  if (random() % 4 == 0) std::shuffle(passes.begin(), passes.end(), random);
  return passes;
}

bool same_bits(const Tensor& x, const Tensor& y) {
  if (x.defined() != y.defined()) return false;
  if (!x.defined()) return true;
  return x.sizes() == y.sizes() && x.dtype() == y.dtype() && ((x == y) | (x.ne(x) & y.ne(y))).all().item<bool>();
}

std::string difference(const Tensors& found, const Tensors& wanted, const char* what) {
  std::ostringstream out;
  for (size_t i = 0; i < wanted.size(); i++)
    if (!same_bits(found[i], wanted[i]))
      out << what << " " << i << ":\n" << found[i] << "\ninstead of\n" << wanted[i] << "\n";
  return out.str();
}

Tensors gradients_of(const Data& data) { return {data.values[0].grad(), data.values[1].grad()}; }

// Empty: it is the same. Throws what compiling throws.
std::string compare(const Step& step, const Data& data, const CompileOptions& options, uint32_t seed) {
  auto eager = data.clone(), compiled = data.clone();
  auto replayed = compile([&](Data& d) { return step(d); }, options);
  for (int call = 0; call < 3; call++) {
    torch::manual_seed(seed + static_cast<uint32_t>(call));
    const auto wanted = step(eager);
    torch::manual_seed(seed + static_cast<uint32_t>(call));
    const auto found = replayed(compiled);
    const auto text = difference(found, wanted, "returned") + difference(compiled.values, eager.values, "memory") +
                      difference(gradients_of(compiled), gradients_of(eager), "gradient");
    if (!text.empty()) return c10::str("call ", call, ": ", text);
  }
  return "";
}

// Random passes match nothing more often than not, and would say so. But no kernel may find that memory was laid out
// wrongly for it.
struct Silent : c10::WarningHandler {
  std::string resized;
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("was resized") != std::string::npos) resized = warning.msg();
  }
};

void fuzz(uint32_t from, uint32_t count, bool codegen) {
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&silent);
  for (uint32_t seed = from; seed < from + count; seed++) {
    std::mt19937 random(seed);
    const auto data = start(random);
    const auto step = draw(random, data);
    const auto passes = draw_passes(random);
    std::string found;
    try {
      found = compare(step, data, {.passes = passes, .codegen = codegen, .verified = true}, seed) +
              std::exchange(silent.resized, "");
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

const uint32_t kTimes = testing::long_soak() ? 20 : 1;

TEST(Fuzz, StepsAreTheEagerOnes) { fuzz(1, 1980 * kTimes, false); }
TEST(Fuzz, WithGeneratedKernels) { fuzz(1'000'001, 25 * kTimes, true); }

}  // namespace
}  // namespace tessera
