#include "tessera/base/error.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/detail/random_ops.h"
#include "tessera/dtensor/policy.h"
#include "tessera/dtensor/random.h"
#include "tessera/tracing/detail/tracer_key.h"

#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/min.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/view_as_real.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <unordered_set>

// Kernels of random ops on DTensors. The values come from random.h and depend on the global index. Sharding rules
// cannot serve here, because the local op would use each rank's own generator. A plain tensor gets here only inside
// deferred_init.
namespace tessera::detail {
namespace {

using at::Tensor;
using MaybeGenerator = std::optional<at::Generator>;
using random_ops::Draw;

// ---- checks and scopes of all kernels ----

void check_no_generator(const char* op, const MaybeGenerator& generator) {
  TESSERA_CHECK(!generator || !generator->defined(), UsageError, op,
                " on a distributed tensor, or in deferred_init, was given a generator. The values "
                "are counter-based and the same on every mesh: omit the generator and call tessera::manual_seed");
}

void check_not_partial(const char* op, const TensorSpec& spec) {
  TESSERA_CHECK(!spec.has_partial(), ShardingError, op, " on ", spec.describe(),
                ": a Partial tensor has no values to fill before its reduction; redistribute it to Replicate or "
                "Shard first");
}

// Checks the arguments of a random op on `t`. Returns the spec of `t`; null for a plain tensor.
const TensorSpec* check_random_op(const char* op, const Tensor& t, const MaybeGenerator& generator = {}) {
  check_no_generator(op, generator);
  if (!is_dtensor(t)) return nullptr;
  const auto& spec = *meta_of(t).spec;
  check_not_partial(op, spec);
  return &spec;
}

// Reports one random op to the debug mode of this thread.
class RandomOpObserverScope {
 public:
  RandomOpObserverScope(const char* op, const TensorSpec& spec) : spec_(&spec) {
    if (C10_UNLIKELY(op_observer() != nullptr))
      op_observer()->begin_op(propagate::entry_of(std::string("aten::") + op), {spec_});
  }
  ~RandomOpObserverScope() {
    if (C10_UNLIKELY(op_observer() != nullptr)) op_observer()->end_op({spec_});
  }

 private:
  const TensorSpec* spec_;
};

class BelowAutograd {
 public:
  BelowAutograd() {
    if (!below_autograd()) guard_.emplace();
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard_;
};

// Fills the local tensor of `self` by f(local, draw).
template <class F>
Tensor& fill_local(const char* op, Tensor& self, const MaybeGenerator& generator, F f) {
  const auto* spec = check_random_op(op, self, generator);
  if (!spec) return fill_plain(self, op, [&](const Draw& draw) { f(self, draw); });
  const RandomOpObserverScope observed(op, *spec);
  Tensor local = local_of(self);
  const BelowAutograd below;
  with_draw(random_state(*spec->mesh.state()), spec->sizes, spec->range_list(),
            [&](const Draw& draw) { f(local, draw); });
  after_write(self);
  return self;
}

// ---- fills ----

Tensor& uniform_(Tensor& self, double from, double to, MaybeGenerator g) {
  if (self.is_complex()) {
    at::view_as_real(self).uniform_(from, to, g);
    return self;
  }
  return fill_local("uniform_", self, g,
                    [&](Tensor& local, const Draw& draw) { random_ops::uniform_(local, from, to, draw); });
}
Tensor& normal_(Tensor& self, double mean, double std, MaybeGenerator g) {
  if (self.is_complex()) {  // each part has half of the variance
    at::view_as_real(self).normal_(mean, std / std::sqrt(2.0), g);
    return self;
  }
  return fill_local("normal_", self, g,
                    [&](Tensor& local, const Draw& draw) { random_ops::normal_(local, mean, std, draw); });
}
Tensor& log_normal_(Tensor& self, double mean, double std, MaybeGenerator g) {
  return fill_local("log_normal_", self, g,
                    [&](Tensor& local, const Draw& draw) { random_ops::log_normal_(local, mean, std, draw); });
}
Tensor& exponential_(Tensor& self, double lambda, MaybeGenerator g) {
  return fill_local("exponential_", self, g,
                    [&](Tensor& local, const Draw& draw) { random_ops::exponential_(local, lambda, draw); });
}
Tensor& cauchy_(Tensor& self, double median, double sigma, MaybeGenerator g) {
  return fill_local("cauchy_", self, g,
                    [&](Tensor& local, const Draw& draw) { random_ops::cauchy_(local, median, sigma, draw); });
}
Tensor& geometric_(Tensor& self, double p, MaybeGenerator g) {
  return fill_local("geometric_", self, g,
                    [&](Tensor& local, const Draw& draw) { random_ops::geometric_(local, p, draw); });
}
Tensor& bernoulli_float_(Tensor& self, double p, MaybeGenerator g) {
  return fill_local("bernoulli_.float", self, g,
                    [&](Tensor& local, const Draw& draw) { random_ops::bernoulli_(local, p, draw); });
}

// The probabilities with the sizes and placements of `like`.
Tensor align_probabilities(const Tensor& p, const TensorSpec& like) {
  TESSERA_CHECK(is_dtensor(p) || implicit_replication(), UsageError,
                "bernoulli_: the probabilities are a plain tensor of sizes ", p.sizes(), " next to ", like.describe(),
                "; call distribute_tensor on them, or open a scope ImplicitReplication");
  Tensor expanded;
  if (is_dtensor(p)) {
    expanded = p.expand(like.sizes);
  } else {
    const auto full = p.expand(like.sizes).contiguous();
    const Placements replicated(like.placements.size(), Replicate());
    expanded =
        wrap(full, intern(like.mesh, replicated, full.sizes(), full.strides(), full.scalar_type(), full.device()));
  }
  const auto& from = meta_of(expanded).spec;
  const auto to = with_placements(*from, like.placements);
  if (to == from) return expanded;
  if (comm_policy() != CommPolicy::Allow && redistribute::plan_between(*from, *to).communicates())
    check_policy(c10::str("bernoulli_ redistributes its probabilities, ", from->describe(), ", to ",
                          to_string(to->placements), "."));
  return redistribute_no_grad(expanded, to);
}

Tensor& bernoulli_tensor_(Tensor& self, const Tensor& p, MaybeGenerator g) {
  const auto* spec = check_random_op("bernoulli_.Tensor", self, g);
  TESSERA_CHECK(spec || !is_dtensor(p), UsageError, "bernoulli_.Tensor: the tensor to fill is plain, sizes ",
                self.sizes(), ", but the probabilities are distributed; distribute the tensor first");
  if (!spec) {
    const auto chances = p.expand(self.sizes());
    return fill_local("bernoulli_.Tensor", self, g,
                      [&](Tensor& plain, const Draw& draw) { random_ops::bernoulli_(plain, chances, draw); });
  }
  if (!is_dtensor(p) && p.numel() == 1) return bernoulli_float_(self, p.item<double>(), g);
  const auto chances = align_probabilities(p, *spec);
  return fill_local("bernoulli_.Tensor", self, g,
                    [&](Tensor& local, const Draw& draw) { random_ops::bernoulli_(local, local_of(chances), draw); });
}

// The largest integer up to which the type represents every integer. random_() draws from 0 to this value.
uint64_t largest_exact_integer(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return uint64_t{1} << 53;
    case at::kFloat:
      return uint64_t{1} << 24;
    case at::kHalf:
      return uint64_t{1} << 11;
    case at::kBFloat16:
      return uint64_t{1} << 8;
    case at::kLong:
      return std::numeric_limits<int64_t>::max();
    case at::kInt:
      return std::numeric_limits<int32_t>::max();
    case at::kShort:
      return std::numeric_limits<int16_t>::max();
    case at::kChar:
      return std::numeric_limits<int8_t>::max();
    case at::kByte:
      return std::numeric_limits<uint8_t>::max();
    case at::kBool:
      return 1;
    default:
      TESSERA_FAIL(UsageError, "random_ on a tensor of type ", type, ": use an integer or floating-point one");
  }
}

Tensor& integers_(const char* op, Tensor& self, int64_t from, uint64_t range, const MaybeGenerator& g) {
  return fill_local(op, self, g, [&](Tensor& local, const Draw& draw) {
    random_ops::integers_(local, from, static_cast<int64_t>(range), draw);
  });
}
Tensor& random_(Tensor& self, MaybeGenerator g) {
  return integers_("random_", self, 0, largest_exact_integer(self.scalar_type()) + 1, g);
}
Tensor& random_from_(Tensor& self, int64_t from, std::optional<int64_t> to, MaybeGenerator g) {
  const auto high = to ? static_cast<uint64_t>(*to) : largest_exact_integer(self.scalar_type()) + 1;
  TESSERA_CHECK(to ? from < *to : from < 0 || static_cast<uint64_t>(from) < high, UsageError, "random_ from ", from,
                " to ", high, ": the range is empty; give the lower bound first, the upper bound is exclusive");
  return integers_("random_.from", self, from, high - static_cast<uint64_t>(from), g);
}
Tensor& random_to_(Tensor& self, int64_t to, MaybeGenerator g) { return random_from_(self, 0, to, g); }

// ---- new tensors ----

Tensor bernoulli_p(const Tensor& self, double p, MaybeGenerator g) {
  check_random_op("bernoulli.p", self, g);
  auto out = at::empty_like(self);
  return bernoulli_float_(out, p, g);
}

Tensor normal_tensor_float(const Tensor& mean, double std, MaybeGenerator g) {
  check_random_op("normal", mean, g);
  auto out = at::empty_like(mean);
  return normal_(out, 0, std, g).add_(mean);
}
Tensor normal_float_tensor(double mean, const Tensor& std, MaybeGenerator g) {
  check_random_op("normal", std, g);
  auto out = at::empty_like(std);
  return normal_(out, 0, 1, g).mul_(std).add_(mean);
}
Tensor normal_tensor_tensor(const Tensor& mean, const Tensor& std, MaybeGenerator g) {
  auto out = at::add(mean, std);  // only its sizes and placements are used
  check_random_op("normal", out, g);
  return normal_(out, 0, 1, g).mul_(std).add_(mean);
}

// Throws ATen's error on every rank if the weights of a row have no positive sum. ATen's kernel for CUDA does not tell
// the host, so nothing is compared there.
void check_probabilities(const Tensor& weights) {
  if (!weights.device().is_cpu() || weights.numel() == 0 || tracing()) return;
  const CommPolicyScope one_number(CommPolicy::Allow);
  const auto least = at::min(weights.detach().sum(-1)).item<double>();
  TESSERA_CHECK(least > 0, UsageError, "invalid multinomial distribution (sum of probabilities <= 0)");
}

// Divides each weight by an exponential random number. The largest quotient has a probability proportional to its
// weight.
Tensor multinomial(const Tensor& weights, c10::SymInt samples, bool replacement, MaybeGenerator g) {
  check_random_op("multinomial", weights, g);
  TESSERA_CHECK(weights.dim() == 1 || weights.dim() == 2, UsageError, "prob_dist must be 1 or 2 dim");  // as ATen
  const int64_t n = samples.expect_int();
  check_probabilities(weights);
  TESSERA_CHECK(n > 0 && (replacement || n <= weights.size(-1)), UsageError, "multinomial: ", n, " samples ",
                replacement ? "with" : "without", " replacement of ", weights.size(-1), " categories");
  auto rows = weights;
  if (replacement && n > 1) {
    auto sizes = weights.sizes().vec();
    sizes.insert(sizes.end() - 1, n);
    rows = weights.unsqueeze(-2).expand(sizes);
  }
  auto race = at::empty_like(rows, at::MemoryFormat::Contiguous);
  exponential_(race, 1, g);
  const auto scores = rows.div(race);
  if (replacement && n > 1) return at::argmax(scores, -1);
  if (n == 1) return at::argmax(scores, -1, /*keepdim=*/true);
  return std::get<1>(at::topk(scores, n));
}

// ---- dropout ----

// The specs of the two results, cached by the spec of the input.
propagate::Decision& dropout_decision(const SpecRef& spec) {
  static const auto& entry = propagate::entry_of("aten::native_dropout");
  propagate::Key key;
  key.push_spec(spec.get());
  const auto hash = key.hash();
  auto& cache = propagate::decision_cache(*spec->mesh.state());
  if (auto* found = cache.find(entry, key, hash)) return *found;
  auto decision = std::make_unique<propagate::Decision>();
  decision->hash = hash;
  decision->key.push_back(key[0]);
  decision->pinned.push_back(spec);
  decision->outs.resize(2);
  decision->outs[0].spec = spec;
  decision->outs[1].spec = intern(spec->mesh, spec->placements, spec->sizes, tessera::contiguous_strides(spec->sizes),
                                  at::kBool, spec->device);
  return cache.insert(entry, std::move(decision));
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const auto& spec = meta_of(input).spec;
  check_not_partial("native_dropout", *spec);
  const RandomOpObserverScope observed("native_dropout", *spec);
  const auto& outs = dropout_decision(spec).outs;
  const auto& local = local_of(input);
  const BelowAutograd below;
  if (train && !*train) {
    auto mask = at::ones(local.sizes(), local.options().dtype(at::kBool));
    return {wrap(local.clone(), outs[0].spec), wrap(std::move(mask), outs[1].spec)};
  }
  auto [out, mask] = with_draw(random_state(*spec->mesh.state()), spec->sizes, spec->range_list(),
                               [&](const Draw& draw) { return random_ops::dropout(local, p, draw); });
  return {wrap(std::move(out), outs[0].spec), wrap(std::move(mask), outs[1].spec)};
}

// ---- ops that LibTorch composes of empty_like and the fills above ----

constexpr const char* kComposedOps[] = {
    "bernoulli",
    "bernoulli.Tensor",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal_functional",
    "rand_like",
    "rand_like.generator",
    "randint_like",
    "randint_like.Tensor",
    "randint_like.Tensor_generator",
    "randint_like.generator",
    "randint_like.low_dtype",
    "randint_like.low_generator_dtype",
    "randn_like",
    "randn_like.generator",
    "random",
    "random.from",
    "random.to",
    "uniform",
};

struct ComposedRandomOp final : c10::OperatorKernel {
  explicit ComposedRandomOp(const char* name) : name(name) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto& self = torch::jit::peek(*stack, 0, op.schema().arguments().size());
    check_random_op(name, self.toTensor());
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
  }
  const char* name;
};

}  // namespace

void register_random_fills(torch::Library& aten, std::unordered_set<std::string>& done) {
  const auto op = [&](const char* name, auto&& kernel) {
    aten.impl(name, std::forward<decltype(kernel)>(kernel));
    done.insert(std::string("aten::") + name);
  };
  op("uniform_", TORCH_FN(uniform_));
  op("normal_", TORCH_FN(normal_));
  op("log_normal_", TORCH_FN(log_normal_));
  op("exponential_", TORCH_FN(exponential_));
  op("cauchy_", TORCH_FN(cauchy_));
  op("geometric_", TORCH_FN(geometric_));
  op("bernoulli_.float", TORCH_FN(bernoulli_float_));
  op("bernoulli_.Tensor", TORCH_FN(bernoulli_tensor_));
  op("random_", TORCH_FN(random_));
  op("random_.from", TORCH_FN(random_from_));
  op("random_.to", TORCH_FN(random_to_));
  op("bernoulli.p", TORCH_FN(bernoulli_p));
  op("normal.Tensor_float", TORCH_FN(normal_tensor_float));
  op("normal.float_Tensor", TORCH_FN(normal_float_tensor));
  op("normal.Tensor_Tensor", TORCH_FN(normal_tensor_tensor));
  op("multinomial", TORCH_FN(multinomial));
}

void register_random_kernels(torch::Library& aten, std::unordered_set<std::string>& done) {
  register_random_fills(aten, done);
  aten.impl("native_dropout", TORCH_FN(native_dropout));
  done.insert("aten::native_dropout");
  for (const char* name : kComposedOps) {
    aten.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<ComposedRandomOp>(name)));
    done.insert(std::string("aten::") + name);
  }
}

}  // namespace tessera::detail
