#include "tessera/propagate/detail/choose.h"

#include "tessera/base/error.h"
#include "tessera/propagate/detail/route.h"
#include "tessera/redistribute/detail/cost.h"
#include "tessera/redistribute/detail/transition.h"
#include "tessera/rules/detail/meta_call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace tessera::propagate {
namespace {

using redistribute::Move;
using rules::ArgFix;
using rules::OpQuery;
using rules::Rule;
using rules::Strategy;

constexpr double kImpossible = std::numeric_limits<double>::infinity();

// The tensors of one decision: all tensors of the call, or, in an elementwise list op, the i-th of every list. `index`
// is their index in call.tensors.
struct SubCall {
  OpQuery query;
  std::vector<int> index;
};

SubCall make_sub_call(const Call& call, int element) {
  SubCall sub{{call.entry.op.schema(), call.args, {}, call.in_backward}, {}};
  for (size_t i = 0; i < call.tensors.size(); i++) {
    const auto& t = call.tensors[i];
    if (element >= 0 && t.element >= 0 && t.element != element) continue;
    sub.query.tensors.push_back({t.sizes, t.strides, t.dtype, t.arg, t.element, t.spec != nullptr});
    sub.index.push_back(static_cast<int>(i));
  }
  return sub;
}

// ---- the cost of a candidate ----

// Bytes of a local tensor. The result is the same on every rank: uneven shards count as even.
double mean_local_bytes(const TensorSpec& spec) {
  double bytes = static_cast<double>(spec.numel()) * static_cast<double>(c10::elementSize(spec.dtype));
  for (size_t a = 0; a < spec.placements.size(); a++)
    if (spec.placements[a].is_sharded()) bytes /= static_cast<double>(spec.mesh.shape()[a]);
  return bytes;
}

// The cost to redistribute one axis of one input.
double axis_cost(const Placement& from, const Placement& to, int64_t n, double local_bytes) {
  if (from == to) return 0;
  if (n == 1) return 1e-6;  // one rank: no data moves; the small cost keeps placements unchanged if possible
  if (from.is_sharded() && to.is_partial())  // it is gathered first and then made partial
    return redistribute::step_cost(Move::AllGather, n, local_bytes) +
           axis_cost(Replicate(), to, n, local_bytes * static_cast<double>(n));
  const auto move = redistribute::detail::direct_move(from, to);
  if (!move) return kImpossible;
  // The choice is greedy: it considers one op. A partial that is reduce-scattered here is often gathered by the next
  // op. So P -> S costs more than P -> R, as in hand-written tensor parallelism, which all-reduces here.
  if (*move == Move::ReduceScatter) return redistribute::step_cost(Move::AllReduce, n, local_bytes) * 1.25;
  return redistribute::step_cost(*move, n, local_bytes);
}

// ---- the strategies of one axis ----

// S(d) in a strategy stands for every way to shard. These are the ways to try: those of the inputs, then plain S(d).
std::vector<Placement> shard_variants(const Call& call, const SubCall& sub, const Strategy& strategy, int64_t axis) {
  std::vector<Placement> variants;
  for (size_t i = 0; i < strategy.in.size(); i++) {
    const auto* spec = call.tensors[sub.index[i]].spec;
    if (!spec || !strategy.in[i].is_sharded()) continue;
    auto current = spec->placements[axis];
    if (!current.is_sharded(strategy.in[i].dim)) continue;
    if (strategy.one_range && current.kind == Placement::Kind::StridedShard) continue;
    current.dim = 0;
    if (std::find(variants.begin(), variants.end(), current) == variants.end()) variants.push_back(current);
  }
  if (std::find(variants.begin(), variants.end(), Shard(0)) == variants.end()) variants.push_back(Shard(0));
  return variants;
}

// The placement of a strategy with S(d) replaced by the given way to shard.
Placement shard_like(const Placement& placement, const Placement& variant) {
  return placement.is_sharded() ? variant.with_dim(placement.dim) : placement;
}

struct AxisChoice {
  const Strategy* strategy = nullptr;
  Placement variant = Shard(0);
  double cost = kImpossible;
};

Trace::Candidate traced(const Strategy& strategy, const Placement& variant, double cost) {
  Trace::Candidate candidate{{}, {}, cost};
  for (const auto& p : strategy.in) candidate.in.push_back(shard_like(p, variant));
  for (const auto& p : strategy.out) candidate.out.push_back(shard_like(p, variant));
  return candidate;
}

struct AxisChooser {
  const Call& call;
  const SubCall& sub;
  const Rule& rule;
  const std::vector<int>& not_written;
  double flops;

  bool must_stay(int arg) const {
    return call.entry.is_written(arg) && std::find(not_written.begin(), not_written.end(), arg) == not_written.end();
  }

  bool writes_a_shard(int64_t axis) const {
    return std::any_of(sub.index.begin(), sub.index.end(), [&](int i) {
      const auto& tensor = call.tensors[i];
      return tensor.spec && must_stay(tensor.arg) && tensor.spec->placements[axis].is_sharded();
    });
  }

  double cost_of(const Strategy& strategy, const Placement& variant, int64_t axis, int64_t n) const {
    double cost = 0;
    bool shares_work = false;
    for (size_t i = 0; i < strategy.in.size(); i++) {
      const auto& tensor = call.tensors[sub.index[i]];
      const auto want = shard_like(strategy.in[i], variant);
      shares_work |= want.is_sharded();
      if (!tensor.spec) {
        if (!want.is_replicate()) return kImpossible;
        continue;
      }
      const auto& current = tensor.spec->placements[axis];
      if (n > 1 && current != want) {
        if (must_stay(tensor.arg)) return kImpossible;
        // A shard of a dim with fewer elements than ranks gives empty local tensors. Such shards are kept where they
        // exist, and used where a written tensor has them.
        const bool finer = want.is_sharded() && !current.is_sharded(want.dim) && tensor.sizes[want.dim] < n;
        if (finer && !writes_a_shard(axis)) return kImpossible;
      }
      cost += axis_cost(current, want, n, mean_local_bytes(*tensor.spec));
    }
    for (const auto& out : strategy.out) shares_work |= out.is_sharded();
    const double work = shares_work ? flops / static_cast<double>(n) : flops;
    return cost + work / redistribute::cost_model().flops_per_us;
  }

  // If all inputs are replicated, so is the result: ones_like of a replicated tensor is replicated, although a sharded
  // result would be cheaper.
  bool is_replicated_on(int64_t axis) const {
    return std::all_of(sub.index.begin(), sub.index.end(), [&](int i) {
      return !call.tensors[i].spec || call.tensors[i].spec->placements[axis].is_replicate();
    });
  }

  AxisChoice best(int64_t axis, int64_t n, Trace::Axis* trace) const {
    AxisChoice best;
    const bool stays_replicated = is_replicated_on(axis);
    for (const auto& strategy : rule.strategies) {
      const auto any_sharded = [](const Placements& placements) {
        return std::any_of(placements.begin(), placements.end(), [](const auto& p) { return p.is_sharded(); });
      };
      const bool shards = any_sharded(strategy.in) || any_sharded(strategy.out);
      const auto variants = shards ? shard_variants(call, sub, strategy, axis) : std::vector<Placement>{Shard(0)};
      for (const auto& variant : variants) {
        const double cost = shards && stays_replicated ? kImpossible : cost_of(strategy, variant, axis, n);
        if (trace) trace->candidates.push_back(traced(strategy, variant, cost));
        if (cost < best.cost) {
          best = {&strategy, variant, cost};
          if (trace) trace->chosen = static_cast<int>(trace->candidates.size()) - 1;
        }
      }
    }
    return best;
  }
};

// On an axis of one rank the local tensor is the global one, so the op itself is right, if it has a kernel at all.
bool needs_special_on_one_rank(const Rule& rule) {
  return std::all_of(rule.strategies.begin(), rule.strategies.end(), [](const auto& s) { return s.special; });
}

bool has_one_rank(const detail::MeshState& mesh) {
  return std::all_of(mesh.shape.begin(), mesh.shape.end(), [](int64_t n) { return n == 1; });
}

// ---- errors ----

[[noreturn]] void fail_no_strategy(const Call& full, const SubCall& sub, int64_t axis) {
  const auto& mesh = *full.mesh;
  Call call{full.entry, full.args, {}, full.mesh, full.in_backward};  // for a list op, only the element that failed
  for (int i : sub.index) call.tensors.push_back(full.tensors[i]);
  if (!call.entry.writes.empty())
    TESSERA_FAIL(ShardingError, describe(call),
                 ": an in-place op keeps the placements of the tensor that it writes, and no strategy on mesh axis '",
                 mesh.axis_name(axis),
                 "' has them. Redistribute the written tensor first, or use the op that returns a new tensor.");
  TESSERA_FAIL(ShardingError, describe(call), ": no sharding strategy is possible on mesh axis '", mesh.axis_name(axis),
               "'. Redistribute an input, or use local_map.");
}

[[noreturn]] void fail_no_rule(const Call& call) {
  TESSERA_FAIL(ShardingError, describe(call), ": ", call.entry.name,
               " has no sharding rule and no functional form. Write one of: register_sharding(\"", call.entry.name,
               "\", strategies); local_map(...) around the call; .redistribute() of the inputs to Replicate; "
               "to_local() or full_tensor() for plain tensors.");
}

[[noreturn]] void fail_view(const Call& call, int64_t axis) {
  TESSERA_FAIL(ShardingError, describe(call), ": an in-place view cannot keep the sharding on mesh axis '",
               call.mesh->axis_name(axis),
               "'. Write .redistribute(...) to Replicate on that axis first, or use the form that returns a view.");
}

// ---- the decision ----

struct DecisionBuilder {
  const Call& call;
  Decision& decision;
  Trace* trace;

  void require(int tensor, PlacementsRef placements) {
    const auto& spec = *call.tensors[tensor].spec;
    auto want = with_placements(spec, placements);
    if (want.get() == &spec) return;
    decision.want[tensor] = std::move(want);
    decision.redistributes = true;
    decision.simple = false;
  }

  PlacementsRef placements_of(int tensor) const {
    const auto& want = decision.want[tensor];
    return want ? PlacementsRef(want->placements) : PlacementsRef(call.tensors[tensor].spec->placements);
  }

  c10::IValue value_of(const ArgFix& fix, const SubCall& sub, size_t first_out) const {
    const auto& mesh = *call.mesh;
    auto list = [](const Sizes& s) { return c10::IValue(std::vector<int64_t>(s.begin(), s.end())); };
    switch (fix.what) {
      case ArgFix::What::OutSizes:
      case ArgFix::What::OutStrides: {
        const auto& out = decision.outs[first_out + fix.tensor];
        auto sizes = local_sizes(out.placements, mesh.shape, mesh.coordinate, out.sizes);
        return list(fix.what == ArgFix::What::OutSizes ? sizes : strides_in_order_of(sizes, out.strides));
      }
      case ArgFix::What::InSizes:
      case ArgFix::What::InSize:
      case ArgFix::What::InOffset:
        break;
    }
    const int index = sub.index[fix.tensor];
    const auto& tensor = call.tensors[index];
    if (!tensor.spec) {
      if (fix.what == ArgFix::What::InSizes) return c10::IValue(tensor.sizes.vec());
      return fix.what == ArgFix::What::InSize ? tensor.sizes[fix.dim] : int64_t{0};
    }
    const auto placements = placements_of(index);
    if (fix.what == ArgFix::What::InSizes)
      return list(local_sizes(placements, mesh.shape, mesh.coordinate, tensor.sizes));
    const auto ranges = local_ranges(placements, mesh.shape, mesh.coordinate, fix.dim, tensor.sizes[fix.dim]);
    if (fix.what == ArgFix::What::InOffset) return ranges.empty() ? tensor.sizes[fix.dim] : ranges[0].begin;
    int64_t size = 0;
    for (const auto& range : ranges) size += range.end - range.begin;
    return size;
  }

  void follow(const SubCall& sub, const Rule& rule) {
    const int input = sub.index[0];
    const auto& mesh = *call.mesh;
    Placements in(call.tensors[input].spec->placements), out;
    for (;;) {
      auto kept = rule.follow(in, mesh.shape);
      const auto lost = std::find(kept.begin(), kept.end(), std::nullopt);
      if (lost == kept.end()) {
        for (auto& p : kept) out.push_back(*p);
        break;
      }
      const auto axis = lost - kept.begin();
      TESSERA_CHECK(!in[axis].is_replicate(), InternalError, describe(call), ": the view rule rejects Replicate");
      if (mesh.shape[axis] > 1 && call.entry.inplace_view) fail_view(call, axis);
      in[axis] = Replicate();
    }
    // On an axis of one rank no data moves, so the input keeps its placement.
    for (size_t a = 0; a < in.size(); a++)
      if (mesh.shape[a] == 1) in[a] = call.tensors[input].spec->placements[a];
    require(input, in);
    for (const auto& o : rule.outs) add_out(o, out);
  }

  void add_out(const rules::OutInfo& info, PlacementsRef placements) {
    Decision::Out out;
    out.sizes = info.sizes;
    out.strides = info.strides.size() == info.sizes.size() ? info.strides : tessera::contiguous_strides(info.sizes);
    out.placements.assign(placements.begin(), placements.end());
    decision.outs.push_back(std::move(out));
  }

  void choose_each_axis(const SubCall& sub, const Rule& rule, int element) {
    const auto& mesh = *call.mesh;
    const auto ndim = static_cast<size_t>(mesh.ndim());
    double flops = rule.flops;
    if (flops == 0)
      for (const auto& out : rule.outs) {
        double numel = 1;
        for (auto s : out.sizes) numel *= static_cast<double>(s);
        flops += numel;
      }
    AxisChooser chooser{call, sub, rule, rule.not_written, flops};
    std::vector<Placements> in(sub.index.size()), out(rule.outs.size());
    for (auto* all : {&in, &out})
      for (auto& placements : *all) placements.resize(ndim);
    bool special = false;
    for (size_t axis = 0; axis < ndim; axis++) {
      const int64_t n = mesh.shape[axis];
      if (trace) trace->axes.push_back({element, static_cast<int64_t>(axis), {}});
      const auto best = chooser.best(static_cast<int64_t>(axis), n, trace ? &trace->axes.back() : nullptr);
      if (!best.strategy && run_without_strategy()) return;
      if (!best.strategy) fail_no_strategy(call, sub, static_cast<int64_t>(axis));
      for (size_t i = 0; i < in.size(); i++) {
        const auto* spec = call.tensors[sub.index[i]].spec;
        in[i][axis] = n == 1 && spec ? spec->placements[axis] : shard_like(best.strategy->in[i], best.variant);
      }
      for (size_t i = 0; i < out.size(); i++) out[i][axis] = shard_like(best.strategy->out[i], best.variant);
      special |= n > 1 ? best.strategy->special : needs_special_on_one_rank(rule);
    }
    for (size_t i = 0; i < in.size(); i++)
      if (call.tensors[sub.index[i]].spec) require(sub.index[i], in[i]);
    for (size_t i = 0; i < out.size(); i++) add_out(rule.outs[i], out[i]);
    if (special) use_special(sub, rule);
  }

  // An op without a strategy that keeps the tensors it writes runs as its functional form, or gathered. A functional
  // form ends with copy_, so copy_ itself, into P(max) for example, is gathered.
  bool run_without_strategy() {
    if (call.entry.writes.empty() || !call.entry.name.starts_with("aten::")) return false;
    decision.simple = false;
    auto functional = call.entry.name == "aten::copy_" ? std::nullopt : functional_form(call.entry.op);
    if (functional) {
      decision.kind = Decision::Kind::Functional;
      decision.special = std::move(functional);
    } else {
      gather();
    }
    return true;
  }

  // Redistributes every input to Replicate. Arguments that the op writes are written back.
  void gather() {
    decision.kind = Decision::Kind::Replicated;
    decision.simple = false;
    const Placements replicated(call.mesh->shape.size(), Replicate());
    for (size_t i = 0; i < call.tensors.size(); i++) {
      const auto& tensor = call.tensors[i];
      if (!tensor.spec) continue;
      Placements want = replicated;
      for (size_t a = 0; a < want.size(); a++)  // one rank: no data moves
        if (call.mesh->shape[a] == 1) want[a] = tensor.spec->placements[a];
      require(static_cast<int>(i), want);
    }
  }

  void use_special(const SubCall& sub, const Rule& rule) {
    decision.special = entry_of(rule.special).op;
    decision.special_args = rule.special_args;
    for (const auto& fix : rule.special_fixes) decision.special_args.push_back(value_of(fix, sub, 0));
    decision.simple = false;
  }

  void add(const SubCall& sub, const Rule& rule, int element) {
    const size_t first_out = decision.outs.size();
    if (!rule.decompose.empty()) {
      decision.kind = Decision::Kind::Decompose;
      if (rule.decompose != call.entry.name) decision.special = entry_of(rule.decompose).op;
      decision.simple = false;
      return;
    }
    if (rule.gathered) return gather();
    if (rule.follow) {
      follow(sub, rule);
      if (!rule.special.empty()) use_special(sub, rule);
    } else {
      choose_each_axis(sub, rule, element);
      if (decision.kind != Decision::Kind::Strategies) return;
    }
    for (const auto& fix : rule.fixes) {
      if (fix.what != ArgFix::What::OutStrides && has_one_rank(*call.mesh)) continue;  // local sizes are global ones
      decision.fixes.emplace_back(fix.arg, value_of(fix, sub, first_out));
      decision.simple = false;
    }
  }
};

}  // namespace

bool view_keeps_shards(const OpEntry& view, const TensorSpec& spec, c10::IntArrayRef sizes) {
  if (has_one_rank(*spec.mesh.state())) return true;
  const c10::IValue args[] = {c10::IValue(), c10::IValue(sizes.vec())};
  const OpQuery query{view.op.schema(), args, {{spec.sizes, spec.strides, spec.dtype, 0, -1, true}}, false};
  const auto kept = view.rule()->fn(query).follow(spec.placements, spec.mesh.shape());
  for (size_t a = 0; a < kept.size(); a++)
    if (!kept[a] && spec.mesh.shape()[a] > 1) return false;
  return true;
}

std::unique_ptr<Decision> choose_strategy(const Call& call, Trace* trace) {
  auto decision = std::make_unique<Decision>();
  decision->want.resize(call.tensors.size());
  for (const auto& t : call.tensors)
    if (t.spec) decision->pinned.push_back(SpecRef::reclaim_copy(t.spec));

  const auto* rule = call.entry.rule();
  DecisionBuilder builder{call, *decision, trace};
  if (!rule) {
    const auto route = route_of(call.entry);
    switch (route.route) {
      case Route::Functional:
        decision->kind = Decision::Kind::Functional;
        decision->special = route.functional;
        decision->simple = false;
        break;
      case Route::Decompose:
        decision->kind = Decision::Kind::Decompose;
        decision->simple = false;
        break;
      case Route::Gathered:
        builder.gather();
        // An op of another library is not gathered silently: its author knows the strategies.
        if (decision->redistributes && !call.entry.name.starts_with("aten::")) fail_no_rule(call);
        break;
      case Route::Rule:
      case Route::None:
        fail_no_rule(call);
    }
    return decision;
  }
  if (rule->lists == rules::ListMode::Joint) {
    auto sub = make_sub_call(call, -1);
    builder.add(sub, rules::evaluate(*rule, call.entry.op, sub.query), -1);
    return decision;
  }
  int elements = 0;
  for (const auto& t : call.tensors) elements = std::max(elements, t.element + 1);
  for (int i = 0; i < elements && decision->kind == Decision::Kind::Strategies; i++) {
    auto sub = make_sub_call(call, i);
    builder.add(sub, rules::evaluate(*rule, call.entry.op, sub.query), i);
  }
  return decision;
}

std::string describe(const Call& call) {
  std::ostringstream out;
  out << call.entry.name << "(";
  for (size_t i = 0; i < call.tensors.size() && i < 8; i++) {
    const auto& t = call.tensors[i];
    out << (i ? ", " : "");
    if (t.spec)
      out << t.spec->brief();
    else
      out << "plain " << c10::toString(t.dtype) << t.sizes;
  }
  if (call.tensors.size() > 8) out << ", ... " << call.tensors.size() - 8 << " more";
  out << ") on mesh(" << DeviceMesh(c10::intrusive_ptr<detail::MeshState>::reclaim_copy(call.mesh)) << ")";
  return out.str();
}

}  // namespace tessera::propagate
