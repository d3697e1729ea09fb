#include "tessera/propagate/detail/choose.h"

#include "tessera/base/error.h"
#include "tessera/redistribute/detail/cost.h"
#include "tessera/redistribute/detail/transition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace tessera::propagate {
namespace {

using redistribute::Move;
using rules::ArgFix;
using rules::OpQuery;
using rules::Strategy;
using rules::Rule;

constexpr double kNever = std::numeric_limits<double>::infinity();

// One element's worth of a call: all its tensors, or, in an elementwise list op, the i-th of every list. `index` maps
// them back to call.tensors.
struct Part {
  OpQuery query;
  std::vector<int> index;
};

Part make_part(const Call& call, int element) {
  Part part{{call.entry.op.schema(), call.args, {}, call.in_backward}, {}};
  for (size_t i = 0; i < call.tensors.size(); i++) {
    const auto& t = call.tensors[i];
    if (element >= 0 && t.element >= 0 && t.element != element) continue;
    part.query.tensors.push_back({t.sizes, t.strides, t.dtype, t.arg, t.element, t.spec != nullptr});
    part.index.push_back(static_cast<int>(i));
  }
  return part;
}

// ---- what a candidate costs ----

// Bytes a rank holds, the same figure on every rank: uneven pieces are counted as even ones.
double mean_local_bytes(const TensorSpec& spec) {
  double bytes = static_cast<double>(spec.numel()) * static_cast<double>(c10::elementSize(spec.dtype));
  for (size_t a = 0; a < spec.placements.size(); a++)
    if (spec.placements[a].is_sharded()) bytes /= static_cast<double>(spec.mesh.shape()[a]);
  return bytes;
}

// Of bringing one axis of one input from `from` to `to`.
double axis_cost(const Placement& from, const Placement& to, int64_t n, double local_bytes) {
  if (from == to) return 0;
  if (n == 1) return 1e-6;  // one rank holds everything either way; still, labels are kept where they can be
  if (from.is_sharded() && to.is_partial())  // gathered first, and then every rank takes its term
    return redistribute::step_cost(Move::AllGather, n, local_bytes) +
           axis_cost(Replicate(), to, n, local_bytes * static_cast<double>(n));
  const auto move = redistribute::detail::direct_move(from, to);
  if (!move) return kNever;
  // A greedy choice sees one op, and a Partial cut now is often gathered by the next: count P -> S as more than P -> R
  // (a hand-written tensor-parallel step reduces to R here, and so must an implicit one).
  if (*move == Move::ReduceScatter) return redistribute::step_cost(Move::AllReduce, n, local_bytes) * 1.25;
  return redistribute::step_cost(*move, n, local_bytes);
}

// ---- rows of one axis ----

// A row says S(d) for any way of cutting. The ways worth trying: those the inputs already use there, then the plain
// one.
std::vector<Placement> shard_variants(const Call& call, const Part& part, const Strategy& strategy, int64_t axis) {
  std::vector<Placement> ways;
  for (size_t i = 0; i < strategy.in.size(); i++) {
    const auto* spec = call.tensors[part.index[i]].spec;
    if (!spec || !strategy.in[i].is_sharded()) continue;
    auto current = spec->placements[axis];
    if (!current.is_sharded(strategy.in[i].dim)) continue;
    if (strategy.one_range && current.kind == Placement::Kind::StridedShard) continue;
    current.dim = 0;
    if (std::find(ways.begin(), ways.end(), current) == ways.end()) ways.push_back(current);
  }
  if (std::find(ways.begin(), ways.end(), Shard(0)) == ways.end()) ways.push_back(Shard(0));
  return ways;
}

Placement shard_like(const Placement& in_row, const Placement& way) {
  return in_row.is_sharded() ? way.with_dim(in_row.dim) : in_row;
}

struct Candidate {
  const Strategy* strategy = nullptr;
  Placement way = Shard(0);
  double cost = kNever;
};

Trace::Candidate traced(const Strategy& strategy, const Placement& way, double cost) {
  Trace::Candidate candidate{{}, {}, cost};
  for (const auto& p : strategy.in) candidate.in.push_back(shard_like(p, way));
  for (const auto& p : strategy.out) candidate.out.push_back(shard_like(p, way));
  return candidate;
}

struct AxisChooser {
  const Call& call;
  const Part& part;
  const Rule& rule;
  const std::vector<int>& not_written;
  double flops;

  bool must_stay(int arg) const {
    return call.entry.is_written(arg) && std::find(not_written.begin(), not_written.end(), arg) == not_written.end();
  }

  bool writes_a_cut(int64_t axis) const {
    return std::any_of(part.index.begin(), part.index.end(), [&](int i) {
      const auto& tensor = call.tensors[i];
      return tensor.spec && must_stay(tensor.arg) && tensor.spec->placements[axis].is_sharded();
    });
  }

  double cost_of(const Strategy& strategy, const Placement& way, int64_t axis, int64_t n) const {
    double cost = 0;
    bool shares_work = false;
    for (size_t i = 0; i < strategy.in.size(); i++) {
      const auto& tensor = call.tensors[part.index[i]];
      const auto want = shard_like(strategy.in[i], way);
      shares_work |= want.is_sharded();
      if (!tensor.spec) {
        if (!want.is_replicate()) return kNever;
        continue;
      }
      const auto& current = tensor.spec->placements[axis];
      if (n > 1 && current != want) {
        if (must_stay(tensor.arg)) return kNever;
        // Cutting a dim finer than it has elements only makes empty pieces; keep those that are there, and follow what
        // is written, which may have some.
        const bool finer = want.is_sharded() && !current.is_sharded(want.dim) && tensor.sizes[want.dim] < n;
        if (finer && !writes_a_cut(axis)) return kNever;
      }
      cost += axis_cost(current, want, n, mean_local_bytes(*tensor.spec));
    }
    for (const auto& out : strategy.out) shares_work |= out.is_sharded();
    const double work = shares_work ? flops / static_cast<double>(n) : flops;
    return cost + work / redistribute::cost_model().flops_per_us;
  }

  // What is whole stays whole: ones_like of a replicated tensor is replicated, however much work cutting it would save.
  bool is_replicated_on(int64_t axis) const {
    return std::all_of(part.index.begin(), part.index.end(), [&](int i) {
      return !call.tensors[i].spec || call.tensors[i].spec->placements[axis].is_replicate();
    });
  }

  Candidate best(int64_t axis, int64_t n, Trace::Axis* trace) const {
    Candidate best;
    const bool stays_whole = is_replicated_on(axis);
    for (const auto& strategy : rule.strategies) {
      TESSERA_CHECK(strategy.in.size() == part.index.size() && strategy.out.size() == rule.outs.size(), InternalError, "rule of ",
                    call.entry.name, ": a row has ", row.in.size(), " inputs and ", row.out.size(),
                    " outputs; the call has ", part.index.size(), " and ", rule.outs.size());
      const bool cuts = std::any_of(strategy.in.begin(), strategy.in.end(), [](auto& p) { return p.is_sharded(); }) ||
                        std::any_of(strategy.out.begin(), strategy.out.end(), [](auto& p) { return p.is_sharded(); });
      for (const auto& way : cuts ? shard_variants(call, part, strategy, axis) : std::vector<Placement>{Shard(0)}) {
        const double cost = cuts && stays_whole ? kNever : cost_of(strategy, way, axis, n);
        if (trace) trace->candidates.push_back(traced(strategy, way, cost));
        if (cost < best.cost) {
          best = {&strategy, way, cost};
          if (trace) trace->chosen = static_cast<int>(trace->candidates.size()) - 1;
        }
      }
    }
    return best;
  }
};

// ---- errors ----

[[noreturn]] void fail_no_strategy(const Call& whole, const Part& part, int64_t axis) {
  const auto& mesh = *whole.mesh;
  Call call{whole.entry, whole.args, {}, whole.mesh, whole.in_backward};  // of a list op, the element that failed
  for (int i : part.index) call.tensors.push_back(whole.tensors[i]);
  if (!call.entry.writes.empty())
    TESSERA_FAIL(
        ShardingError, describe(call),
        ": an in-place op keeps the placements of what it writes, and with these on mesh axis '", mesh.axis_name(axis),
        "' it cannot be computed. Redistribute the written tensor first, or use the form that returns a new one.");
  TESSERA_FAIL(ShardingError, describe(call), ": no rule row fits on mesh axis '", mesh.axis_name(axis),
               "'. Redistribute an input, or use local_map.");
}

[[noreturn]] void fail_no_rule(const Call& call) {
  TESSERA_FAIL(ShardingError, describe(call), ": ", call.entry.name,
               " has no sharding rule and cannot be decomposed. Three ways out: register_sharding(\"", call.entry.name,
               "\", rows); local_map(...) around the call; redistribute the inputs to Replicate.");
}

[[noreturn]] void fail_view(const Call& call, int64_t axis) {
  TESSERA_FAIL(ShardingError, describe(call), ": the result would be no view, since the cut on mesh axis '",
               call.mesh->axis_name(axis),
               "' does not survive it. Write .redistribute(...) to Replicate on that axis first, or reshape() where a "
               "copy will do.");
}

// ---- putting a decision together ----

struct Builder {
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

  c10::IValue value_of(const ArgFix& fix, const Part& part, size_t first_out) const {
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
    const int index = part.index[fix.tensor];
    const auto& tensor = call.tensors[index];
    if (!tensor.spec) {
      if (fix.what == ArgFix::What::InSizes) return c10::IValue(tensor.sizes.vec());
      return fix.what == ArgFix::What::InSize ? tensor.sizes[fix.dim] : int64_t{0};
    }
    const auto placements = placements_of(index);
    if (fix.what == ArgFix::What::InSizes)
      return list(local_sizes(placements, mesh.shape, mesh.coordinate, tensor.sizes));
    const auto runs = local_ranges(placements, mesh.shape, mesh.coordinate, fix.dim, tensor.sizes[fix.dim]);
    if (fix.what == ArgFix::What::InOffset) return runs.empty() ? tensor.sizes[fix.dim] : runs[0].begin;
    int64_t size = 0;
    for (const auto& run : runs) size += run.end - run.begin;
    return size;
  }

  void follow(const Part& part, const Rule& rule) {
    const int input = part.index[0];
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
      TESSERA_CHECK(!in[axis].is_replicate(), InternalError, describe(call), ": the view rule refused Replicate");
      if (mesh.shape[axis] > 1 && call.entry.view && !call.entry.may_copy && !call.in_backward) fail_view(call, axis);
      in[axis] = Replicate();
    }
    // On an axis of one rank nothing moves, whatever the labels say.
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

  void choose_each_axis(const Part& part, const Rule& rule, int element) {
    const auto& mesh = *call.mesh;
    const auto ndim = static_cast<size_t>(mesh.ndim());
    double flops = rule.flops;
    if (flops == 0)
      for (const auto& out : rule.outs) {
        double numel = 1;
        for (auto s : out.sizes) numel *= static_cast<double>(s);
        flops += numel;
      }
    AxisChooser chooser{call, part, rule, rule.not_written, flops};
    std::vector<Placements> in(part.index.size()), out(rule.outs.size());
    for (auto* all : {&in, &out})
      for (auto& placements : *all) placements.resize(ndim);
    bool special = false;
    for (size_t axis = 0; axis < ndim; axis++) {
      const int64_t n = mesh.shape[axis];
      if (trace) trace->axes.push_back({element, static_cast<int64_t>(axis), {}});
      const auto best = chooser.best(static_cast<int64_t>(axis), n, trace ? &trace->axes.back() : nullptr);
      if (!best.strategy) fail_no_strategy(call, part, static_cast<int64_t>(axis));
      for (size_t i = 0; i < in.size(); i++) {
        const auto* spec = call.tensors[part.index[i]].spec;
        in[i][axis] = n == 1 && spec ? spec->placements[axis] : shard_like(best.strategy->in[i], best.way);
      }
      for (size_t i = 0; i < out.size(); i++) out[i][axis] = shard_like(best.strategy->out[i], best.way);
      special |= best.strategy->special;
    }
    for (size_t i = 0; i < in.size(); i++)
      if (call.tensors[part.index[i]].spec) require(part.index[i], in[i]);
    for (size_t i = 0; i < out.size(); i++) add_out(rule.outs[i], out[i]);
    if (special) use_special(part, rule);
  }

  void use_special(const Part& part, const Rule& rule) {
    decision.special = entry_of(rule.special).op;
    decision.special_args = rule.special_args;
    for (const auto& fix : rule.special_fixes) decision.special_args.push_back(value_of(fix, part, 0));
    decision.simple = false;
  }

  void add(const Part& part, const Rule& rule, int element) {
    const size_t first_out = decision.outs.size();
    if (!rule.decompose.empty()) {
      decision.kind = Decision::Kind::Decompose;
      decision.special = entry_of(rule.decompose).op;
      decision.simple = false;
      return;
    }
    if (rule.follow) {
      follow(part, rule);
      if (!rule.special.empty()) use_special(part, rule);
    } else {
      choose_each_axis(part, rule, element);
    }
    for (const auto& fix : rule.fixes) {
      decision.fixes.emplace_back(fix.arg, value_of(fix, part, first_out));
      decision.simple = false;
    }
  }
};

bool all_replicated(const Call& call) {
  for (const auto& t : call.tensors)
    if (t.spec)
      for (size_t a = 0; a < t.spec->placements.size(); a++)
        if (!t.spec->placements[a].is_replicate() && call.mesh->shape[a] > 1) return false;
  return true;
}

}  // namespace

bool view_keeps_shards(const OpEntry& view, const TensorSpec& spec, c10::IntArrayRef sizes) {
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
  if (!rule) {
    decision->simple = false;
    const auto& op = call.entry.op;
    const bool functional = call.entry.writes.empty() && !call.entry.view;
    if (functional && op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd))
      decision->kind = Decision::Kind::Decompose;
    else if (functional && !call.entry.random && all_replicated(call))
      decision->kind = Decision::Kind::Replicated;
    else
      fail_no_rule(call);
    return decision;
  }

  Builder builder{call, *decision, trace};
  if (rule->lists == rules::ListMode::Joint) {
    auto part = make_part(call, -1);
    builder.add(part, rule->fn(part.query), -1);
    return decision;
  }
  int elements = 0;
  for (const auto& t : call.tensors) elements = std::max(elements, t.element + 1);
  for (int i = 0; i < elements; i++) {
    auto part = make_part(call, i);
    builder.add(part, rule->fn(part.query), i);
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
