// Random sequences of ops on DTensors beside the same ops on plain tensors: views, in-place writes to tensors, to views
// and to local tensors, redistribution, hooks and custom autograd functions that write to views in backward, backward.
// Values, gradients and the error "modified by an inplace operation" must be the same. A call that a DTensor alone
// refuses (ShardingError, UsageError) must change nothing. A failure prints the seed and the sequence.
// 500 sequences; 20,000 with TESSERA_SOAK=1 (make soak).
#include "tessera/base/error.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/detail/soak.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <random>
#include <sstream>

namespace tessera::test {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// One op of a sequence: an entry of kAliasOps and its arguments.
struct AliasChoice {
  size_t op = 0;
  size_t a = 0, b = 0;   // operands: indices of values
  int64_t m = 0, n = 0;  // dims, offsets
  double x = 0;
};
using AliasProgram = std::vector<AliasChoice>;

struct AliasOp {
  enum class Kind : uint8_t { Value, View, Write };
  const char* name;
  Kind kind;
  Tensor (*run)(const Tensor& a, const Tensor& b, const AliasChoice& k);  // a Write returns nothing
};

int64_t dim_of(const Tensor& t, int64_t n) { return t.dim() == 0 ? 0 : n % t.dim(); }
Tensor first_part(const Tensor& t, const AliasChoice& k) {
  const auto d = dim_of(t, k.m);
  return t.slice(d, k.n % 2, k.n % 2 + std::max<int64_t>(1, t.size(d) / 2));
}

#define ALIAS_OP(name, kind, expression)                                                                         \
  {                                                                                                              \
    name, AliasOp::Kind::kind,                                                                                   \
        [](const Tensor& a, [[maybe_unused]] const Tensor& b, [[maybe_unused]] const AliasChoice& k) -> Tensor { \
          return expression;                                                                                     \
        }                                                                                                        \
  }
#define ALIAS_WRITE(name, expression)                                                                            \
  {                                                                                                              \
    name, AliasOp::Kind::Write,                                                                                  \
        [](const Tensor& a, [[maybe_unused]] const Tensor& b, [[maybe_unused]] const AliasChoice& k) -> Tensor { \
          expression;                                                                                            \
          return {};                                                                                             \
        }                                                                                                        \
  }
const AliasOp kAliasOps[] = {
    ALIAS_OP("mul number", Value, a* k.x),
    ALIAS_OP("add", Value, a + b),
    ALIAS_OP("mul", Value, a* b),
    ALIAS_OP("sin", Value, a.sin()),
    ALIAS_OP("sigmoid", Value, a.sigmoid()),
    ALIAS_OP("sum", Value, a.sum(dim_of(a, k.m), true)),
    ALIAS_OP("cat", Value, at::cat({a, b}, dim_of(a, k.m))),
    ALIAS_OP("mm", Value, at::mm(a, b)),
    ALIAS_OP("clone", Value, a.clone()),
    ALIAS_OP("slice", View, first_part(a, k)),
    ALIAS_OP("slice step", View, a.slice(dim_of(a, k.m), k.n % 2, c10::nullopt, 2)),
    ALIAS_OP("select", View, a.select(dim_of(a, k.m), k.n % 2)),
    ALIAS_OP("transpose", View, a.transpose(dim_of(a, k.m), dim_of(a, k.n))),
    ALIAS_OP("flatten", View, a.view({-1})),
    ALIAS_OP("view", View, a.view({2, -1})),
    ALIAS_OP("unsqueeze", View, a.unsqueeze(dim_of(a, k.m))),
    ALIAS_OP("squeeze", View, a.squeeze()),
    ALIAS_OP("diagonal", View, a.diagonal(k.n % 2)),
    ALIAS_OP("split", View, a.split(2, dim_of(a, k.m)).at(0)),
    ALIAS_OP("unbind", View, a.unbind(dim_of(a, k.m)).at(1)),
    ALIAS_OP("unfold", View, a.unfold(dim_of(a, k.m), 2, 2)),
    ALIAS_OP("detach", View, a.detach()),
    ALIAS_OP("alias", View, at::alias(a)),
    ALIAS_WRITE("mul_ number", a.mul_(k.x)),
    ALIAS_WRITE("add_ number", a.add_(k.x)),
    ALIAS_WRITE("add_", a.add_(b, k.x)),
    ALIAS_WRITE("mul_", a.mul_(b)),
    ALIAS_WRITE("copy_", a.copy_(b)),
    ALIAS_WRITE("zero_", a.zero_()),
    ALIAS_WRITE("fill_", a.fill_(k.x)),
    ALIAS_WRITE("sigmoid_", a.sigmoid_()),
    ALIAS_WRITE("index_fill_", a.index_fill_(dim_of(a, k.m), at::tensor({k.n % 2}), k.x)),
    ALIAS_WRITE("foreach", at::_foreach_mul_({a, a.detach()}, k.x)),
};
#undef ALIAS_OP
#undef ALIAS_WRITE

// True if the op writes to elements that it also reads as another operand. PyTorch leaves open which values it reads.
bool reads_what_it_writes(const AliasChoice& k, const Tensors& v) {
  const Tensor &a = v[k.a], &b = v[k.b];
  if (kAliasOps[k.op].kind != AliasOp::Kind::Write || !a.is_alias_of(b)) return false;
  return a.sizes() != b.sizes() || a.strides() != b.strides() || a.storage_offset() != b.storage_offset();
}

Tensor run_choice(const AliasChoice& k, const Tensors& v) { return kAliasOps[k.op].run(v[k.a], v[k.b], k); }

// Runs a program on values that start with `gradient`, and returns a value that every write must have reached.
Tensor run_program(const AliasProgram& program, const Tensor& gradient) {
  Tensors v = {gradient.sin(), gradient * 0.5};  // new memory
  for (const auto& k : program)
    if (auto made = run_choice(k, v); made.defined()) v.push_back(std::move(made));
  return v[0] + v[1];
}

// sin(x), with a backward that runs a program on the gradient.
struct ProgramFunction : torch::autograd::Function<ProgramFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const AliasProgram* program) {
    ctx->save_for_backward({x});
    ctx->saved_data["program"] = reinterpret_cast<int64_t>(program);
    return x.sin();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& gradients) {
    const auto* program = reinterpret_cast<const AliasProgram*>(ctx->saved_data["program"].toInt());
    return {run_program(*program, gradients[0]) * ctx->get_saved_variables()[0].cos(), Tensor()};
  }
};

// x.mul_(2) as a custom function.
struct DoubleInPlace : torch::autograd::Function<DoubleInPlace> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, Tensor x) {
    x.mul_(2);
    ctx->mark_dirty({x});
    return x;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               const torch::autograd::tensor_list& gradients) {
    return {gradients[0] * 2};
  }
};

// True if the local tensor is dense where the global one is, with the same order of dims. Otherwise a later view
// throws, or gives other strides than the plain one.
bool has_the_memory_order_of(const Tensor& dist) {
  const auto& spec = DTensor(dist).spec();
  if (!spec.prototype->is_non_overlapping_and_dense()) return true;
  const auto local = DTensor(dist.detach()).to_local();
  const auto expected = strides_in_order_of(local.sizes(), spec.strides);
  for (int64_t d = 0; d < local.dim(); d++)
    if (local.numel() > 0 && local.size(d) > 1 && local.stride(d) != expected[d]) return false;
  return true;
}

// The stride of a dim of size 1 does not matter.
bool equal_strides(const Tensor& a, const Tensor& b) {
  bool equal = a.sizes() == b.sizes();
  for (int64_t d = 0; equal && d < a.dim(); d++) equal = a.size(d) == 1 || a.stride(d) == b.stride(d);
  return equal;
}

struct AliasCounts {
  std::atomic<int64_t> done = 0, rejected = 0, refused = 0, backwards = 0, refused_backwards = 0, detected = 0;
};

class AliasSequence {
 public:
  AliasSequence(uint32_t seed, DeviceMesh mesh, AliasCounts& counts)
      : random_(seed), mesh_(std::move(mesh)), counts_(counts) {
    log_ << "seed " << seed << " on mesh(" << mesh_ << ")\n";
  }

  // Empty if DTensors and plain tensors agree. Throws if ranks disagree about collectives.
  std::string run() {
    for (int i = 0; i < 2; i++) add_leaf();
    const size_t steps = 6 + below(10);
    for (size_t i = 0; i < steps && problem_.empty() && !ended_; i++) step();
    if (problem_.empty() && !ended_) backward();
    if (problem_.empty()) compare_values();
    return problem_;
  }
  std::string log() const { return log_.str(); }

 private:
  size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

  void add_leaf() {
    static const std::vector<std::vector<int64_t>> kSizes = {{5, 4}, {4, 4}, {4, 5}, {4}, {2, 3, 4}};
    const auto& sizes = kSizes[below(kSizes.size())];
    Placements placements;
    for (int64_t axis = 0; axis < mesh_.ndim(); axis++)
      placements.push_back(below(3) == 0 ? Replicate() : Shard(static_cast<int64_t>(below(sizes.size()))));
    const auto value = at::linspace(-1, 1, c10::multiply_integers(sizes), at::kDouble).view(sizes) +
                       static_cast<double>(below(10)) * 0.1;
    const bool requires_grad = below(4) != 0;
    Tensor dist = distribute_tensor(value, mesh_, placements, {.src_data_rank = std::nullopt});
    dist_.push_back(dist.set_requires_grad(requires_grad));
    plain_.push_back(value.clone().set_requires_grad(requires_grad));
    leaves_.push_back(dist_.size() - 1);
    log_ << "  " << dist_.size() - 1 << " = leaf " << DTensor(dist).spec().describe()
         << (requires_grad ? " requires_grad" : "") << "\n";
  }

  AliasChoice draw(size_t values) {
    const auto pick = [&] { return below(3) == 0 ? below(values) : values - 1 - below(std::min<size_t>(3, values)); };
    return {below(std::size(kAliasOps)),
            pick(),
            pick(),
            static_cast<int64_t>(below(3)),
            static_cast<int64_t>(below(3)),
            static_cast<double>(below(5)) * 0.5 - 0.75};
  }

  // A program that runs on a gradient like `like`.
  const AliasProgram& draw_program(const Tensor& like) {
    auto& program = *programs_.emplace_back(std::make_unique<AliasProgram>());
    const at::NoGradGuard no_grad;
    Tensors v = {like.detach().clone(), like.detach().clone()};
    for (int tries = 0; tries < 12; tries++) {
      const auto k = draw(v.size());
      if (reads_what_it_writes(k, v)) continue;
      try {
        if (auto made = run_choice(k, v); made.defined()) v.push_back(std::move(made));
        program.push_back(k);
        log_ << "    in backward: " << kAliasOps[k.op].name << " " << describe(k) << "\n";
      } catch (const std::exception&) {
      }
    }
    return program;
  }

  static std::string describe(const AliasChoice& k) {
    return c10::str("a=", k.a, " b=", k.b, " m=", k.m, " n=", k.n, " x=", k.x);
  }

  // Runs f on the DTensors, then on the plain tensors. Both must succeed or both must throw, unless the DTensors refuse
  // the call. Adds the result to the values.
  template <class F>
  void both(const std::string& name, F f) {
    log_ << "  " << dist_.size() << " = " << name;
    Tensor dist;
    bool threw = false;
    std::string dist_error;
    try {
      dist = f(dist_);
    } catch (const ShardingError&) {
      counts_.refused++;
      log_ << " (refused)\n";
      return;
    } catch (const UsageError&) {
      counts_.refused++;
      log_ << " (refused)\n";
      return;
    } catch (const c10::Error& error) {
      threw = true;
      dist_error = error.what_without_backtrace();
    } catch (const std::exception& error) {
      threw = true;
      dist_error = error.what();
    }
    Tensor plain;
    try {
      plain = f(plain_);
    } catch (const std::exception& error) {
      if (!threw) problem_ = c10::str("only the plain tensors threw: ", std::string(error.what()).substr(0, 300));
      counts_.rejected++;
      log_ << " (rejected)\n";
      return;
    }
    if (threw) {
      problem_ = "only the DTensors threw: " + dist_error;
      return;
    }
    counts_.done++;
    log_ << "\n";
    if (!plain.defined()) return;
    if (plain.numel() == 0 || plain.numel() > 200) return;
    dist_.push_back(dist);
    plain_.push_back(plain);
  }

  void step() {
    const auto pick = [&] { return dist_.size() - 1 - below(std::min<size_t>(4, dist_.size())); };
    const auto at = pick();
    switch (below(16)) {
      case 0:
        return add_leaf();
      case 1:
        return backward();
      case 2: {
        const auto* program = &draw_program(plain_[at]);
        return both(c10::str("custom function of ", at),
                    [=](Tensors& v) { return ProgramFunction::apply(v[at], program); });
      }
      case 3:
        return both(c10::str("in-place function of ", at), [=](Tensors& v) { return DoubleInPlace::apply(v[at]); });
      case 4: {
        if (!plain_[at].requires_grad()) return;
        const auto* program = &draw_program(plain_[at]);
        return both(c10::str("hook on ", at), [=](Tensors& v) {
          v[at].register_hook([program](const Tensor& g) { return run_program(*program, g); });
          return Tensor();
        });
      }
      case 5: {
        Placements to;
        const bool same = below(2) == 0 || mesh_.size() == 1;  // on one rank nothing is copied
        for (const auto& p : DTensor(dist_[at]).placements())
          to.push_back(same || plain_[at].dim() == 0 ? p : below(2) == 0 ? Replicate() : Shard(0));
        if (PlacementsRef(to) != DTensor(dist_[at]).placements()) {
          for (auto& p : to)
            if (p.is_partial()) p = Replicate();
          return both(c10::str("redistribute ", at, " to ", to_string(to)),
                      [=](Tensors& v) { return is_dtensor(v[at]) ? DTensor(v[at]).redistribute(to) : v[at].clone(); });
        }
        return both(c10::str("redistribute ", at, " to the same placements"),
                    [=](Tensors& v) { return is_dtensor(v[at]) ? DTensor(v[at]).redistribute(to) : at::alias(v[at]); });
      }
      case 6: {
        // The local tensor of a view that communicated is a copy: writes to it do not reach the base.
        if (tessera::detail::meta_of(dist_[at]).gathered) return;
        const double x = static_cast<double>(below(5)) * 0.5 - 0.75;
        return both(c10::str("mul_ ", x, " of the local tensor of ", at), [=](Tensors& v) {
          const at::NoGradGuard no_grad;
          (is_dtensor(v[at]) ? DTensor(v[at]).to_local() : v[at].detach()).mul_(x);
          return Tensor();
        });
      }
      case 7:
        // from_local copies other memory orders. The gradient of a partial local tensor is partial, by definition.
        if (!plain_[at].is_contiguous() || DTensor(dist_[at]).spec().has_partial()) return;
        if (tessera::detail::meta_of(dist_[at]).gathered) return;
        return both(c10::str("from_local of the local tensor of ", at), [=](Tensors& v) -> Tensor {
          if (!is_dtensor(v[at])) return at::alias(v[at]);
          const DTensor d(v[at]);
          return DTensor::from_local(d.to_local(), d.device_mesh(), d.placements(),
                                     {.shape = d.sizes().vec(), .stride = d.strides().vec()});
        });
      case 8: {
        const auto k = draw(dist_.size());
        if (reads_what_it_writes(k, plain_)) return;
        return both(c10::str(kAliasOps[k.op].name, " without grad ", describe(k)), [=](Tensors& v) {
          const at::NoGradGuard no_grad;
          return run_choice(k, v);
        });
      }
      default: {
        const auto k = draw(dist_.size());
        if (reads_what_it_writes(k, plain_)) return;
        return both(c10::str(kAliasOps[k.op].name, " ", describe(k)), [=](Tensors& v) { return run_choice(k, v); });
      }
    }
  }

  static Tensor loss_of(const Tensors& v) {
    auto loss = (v[0] * v[0]).sum() * 0.1;
    for (size_t i = 1; i < v.size(); i++) loss = loss + (i % 2 == 0 ? v[i] * 2 : v[i].cos()).sum();
    return loss;
  }

  // Computes a loss and its gradients. Returns the error; empty if it succeeds.
  static std::string backward_error(const Tensors& v) {
    try {
      const auto loss = loss_of(v);
      if (!loss.requires_grad()) return "no gradient";
      loss.backward({}, /*retain_graph=*/true);
    } catch (const ShardingError& error) {
      return "refused: " + std::string(error.what_without_backtrace());
    } catch (const UsageError& error) {
      return "refused: " + std::string(error.what_without_backtrace());
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  }

  void backward() {
    const auto found = backward_error(dist_);
    log_ << "  backward " << found << "\n";
    counts_.backwards++;
    if (found.starts_with("refused")) {
      counts_.refused_backwards++;
      ended_ = true;
      return;
    }
    const auto expected = backward_error(plain_);
    if (found.empty() != expected.empty())
      problem_ = c10::str("backward of the DTensors: '", found, "', of the plain tensors: '", expected, "'");
    if (!expected.empty()) {
      counts_.detected += expected.find("modified by an inplace operation") != std::string::npos;
      ended_ = true;
      return;
    }
    if (problem_.empty()) compare_gradients();
  }

  void compare(const std::string& what, const Tensor& dist, const Tensor& plain) {
    if (!problem_.empty()) return;
    if (dist.defined() != plain.defined()) {
      problem_ = c10::str(what, ": only one of them is defined, plain: ", plain.defined());
    } else if (dist.defined()) {
      if (!is_dtensor(dist)) {
        problem_ = what + " is plain";
        return;
      }
      if (!equal_strides(dist, plain) || !has_the_memory_order_of(dist)) {
        problem_ = c10::str(what, ", ", DTensor(dist).spec().describe(), ", has strides ", dist.strides(), ", local ",
                            DTensor(dist.detach()).to_local().strides(), ", plain ", plain.strides());
        return;
      }
      const auto full = DTensor(dist.detach()).full_tensor();
      if (full.sizes() != plain.sizes() || !at::allclose(full, plain.detach(), 1e-8, 1e-10, /*equal_nan=*/true)) {
        std::ostringstream out;
        out << what << ", " << DTensor(dist).spec().describe() << ":\n" << full << "\ninstead of\n" << plain.detach();
        problem_ = out.str();
      }
    }
  }
  void compare_values() {
    for (size_t i = 0; i < dist_.size(); i++) compare(c10::str("value ", i), dist_[i], plain_[i]);
  }
  void compare_gradients() {
    for (auto i : leaves_) compare(c10::str("gradient of ", i), dist_[i].grad(), plain_[i].grad());
  }

  std::mt19937 random_;
  DeviceMesh mesh_;
  AliasCounts& counts_;
  Tensors dist_, plain_;
  std::vector<size_t> leaves_;
  std::vector<std::unique_ptr<AliasProgram>> programs_;
  std::ostringstream log_;
  std::string problem_;
  bool ended_ = false;
};

// Runs `count` sequences on one mesh, 40 times as many in the long form. Prints the first problem.
void compare_sequences(const std::string& mesh_text, uint32_t first, uint32_t count) {
  const auto seeds = testing::soak_seeds(first, count, 40 * count);
  AliasCounts counts;
  int64_t ranks = 1;
  for (auto n : parse_mesh_shape(mesh_text).shape) ranks *= n;
  testing::run_ranks(ranks,
                     [&](testing::Rank& me) {
                       const auto mesh = me.mesh(mesh_text);
                       int problems = 0;
                       for (uint32_t seed = seeds.first; seed < seeds.end; seed++) {
                         AliasSequence sequence(seed, mesh, counts);
                         std::string problem;
                         try {
                           problem = sequence.run();
                         } catch (const std::exception&) {
                           ADD_FAILURE() << "rank " << me.rank << ", " << sequence.log();
                           throw;
                         }
                         if (!problem.empty() && problems++ == 0)
                           ADD_FAILURE() << (me.rank == 0 ? sequence.log() : "") << "rank " << me.rank << ": "
                                         << problem;
                       }
                       EXPECT_EQ(problems, 0) << "sequences differ, rank " << me.rank;
                     },
                     {.timeout = std::chrono::seconds(20)});
  std::cout << mesh_text << ": " << seeds.end - seeds.first << " sequences, " << counts.done / ranks << " ops, "
            << counts.rejected / ranks << " that both reject, " << counts.refused / ranks << " that DTensors refuse; "
            << counts.backwards / ranks << " backwards, " << counts.detected / ranks << " after a write that autograd "
            << "forbids, " << counts.refused_backwards / ranks << " that DTensors refuse\n";
}

TEST(AliasingSoak, OneRank) { compare_sequences("x=1", 1, 50); }
TEST(AliasingSoak, TwoRanks) { compare_sequences("x=2", 100'001, 250); }
TEST(AliasingSoak, ThreeRanks) { compare_sequences("x=3", 200'001, 100); }
TEST(AliasingSoak, TwoAxes) { compare_sequences("x=2,y=2", 300'001, 100); }

}  // namespace
}  // namespace tessera::test
