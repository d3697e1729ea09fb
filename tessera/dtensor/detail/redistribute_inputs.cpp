#include "tessera/dtensor/detail/redistribute_inputs.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/dtensor/detail/observer.h"
#include "tessera/dtensor/policy.h"
#include "tessera/redistribute/detail/execute.h"
#include "tessera/tracing/detail/tracer_key.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/StringUtil.h>

namespace tessera::detail {

using propagate::OpEntry;

namespace {

// A partial tensor or an intermediate result may be used again, so its redistribution is cached. Not cached are
//   - a parameter: its gathered value would stay in memory,
//   - a tensor whose local tensor is also visible as a plain one: a rank that writes to it would redistribute again
//     while its peers use the cached value.
//   - a view that communicated: its values depend on its base.
bool is_worth_caching(const at::Tensor& t, const TensorSpec& from) {
  return !t.is_inference() && (from.has_partial() || !t.is_leaf()) && !meta_of(t).gathered && !has_plain_alias(t);
}

bool find_cached(const at::Tensor& t, RedistributedInput& input) {
  const auto& meta = meta_of(t);
  const auto& cached = meta.cached;
  if (tracing() || !cached.local.defined() || cached.spec.get() != input.to || meta.local.is_inference() ||
      cached.source_version != meta.local._version() || cached.version != cached.local._version() || has_plain_alias(t))
    return false;
  input.local = cached.local;
  return true;
}

void cache_result(const at::Tensor& t, const RedistributedInput& input, const TensorSpec& from) {
  auto& meta = meta_of(t);
  if (!is_worth_caching(t, from) || meta.local.is_inference() || input.local.is_inference() ||
      input.local.is_same(meta.local))
    return;
  meta.cached = {input.local, SpecRef::reclaim_copy(input.to), static_cast<uint32_t>(meta.local._version()),
                 static_cast<uint32_t>(input.local._version())};
}

// The intermediate spec of Shard -> Partial, which no single plan does: Shard -> Replicate first. It occurs when a
// sharded gradient is added to a partial one. Returns `from` itself if one plan is enough.
SpecRef intermediate_spec(const TensorSpec& from, const TensorSpec& to) {
  Placements via(from.placements);
  for (size_t a = 0; a < via.size(); a++)
    if (via[a].is_sharded() && to.placements[a].is_partial()) via[a] = Replicate();
  return with_placements(from, via);
}

redistribute::Local redistribute_one(const at::Tensor& t, const TensorSpec& from, const TensorSpec& to) {
  auto local = local_of(t);
  const auto via = intermediate_spec(from, to);
  if (via.get() == &from) return redistribute::execute(redistribute::plan_between(from, to), local, from, to);
  auto gathered = redistribute::execute(redistribute::plan_between(from, *via), local, from, *via);
  if (gathered.pending) funcol::wait(gathered.tensor, gathered.pending);
  return redistribute::execute(redistribute::plan_between(*via, to), gathered.tensor, *via, to);
}

// A dim with stride 0 (expand) has stride 0 in the redistributed local tensor too. Ops choose the memory order of their
// results by the strides of their operands, and the global strides of a result are chosen in the same way.
at::Tensor expanded_like(at::Tensor local, const TensorSpec& spec) {
  if (C10_LIKELY(spec.prototype->is_non_overlapping_and_dense())) return local;
  at::AutoDispatchBelowADInplaceOrView below;
  for (int64_t d = 0; d < local.dim(); d++)
    if (spec.strides[d] == 0 && local.size(d) > 1) local = local.narrow(d, 0, 1).expand_as(local);
  return local;
}

// Reports the end of the redistributions to the observer, also if one of them throws.
struct RedistributedScope {
  OpObserver* observer = op_observer();
  ~RedistributedScope() {
    if (observer) observer->redistributed();
  }
};

void check_input_policy(const OpEntry& entry, const RedistributedInput& input, const TensorSpec& from) {
  if (comm_policy() == CommPolicy::Allow) return;
  const auto via = intermediate_spec(from, *input.to);
  const bool communicates = via.get() != &from || redistribute::plan_between(from, *input.to).communicates();
  if (communicates)
    check_policy(c10::str(entry.name, " redistributes its tensor ", input.index, ", ", from.describe(), ", to ",
                          to_string(input.to->placements), "."));
}

}  // namespace

void redistribute_all(const OpEntry& entry, std::vector<RedistributedInput>& inputs) {
  std::vector<RedistributedInput*> open;
  for (auto& input : inputs)
    if (!find_cached(*input.tensor, input)) open.push_back(&input);
  if (open.empty()) return;
  for (const auto* input : open) check_input_policy(entry, *input, *meta_of(*input->tensor).spec);

  const RedistributedScope scope;
  bool one_by_one = open.size() == 1;
  std::vector<const TensorSpec*> from, to;
  for (auto* input : open) {
    const auto& spec = *meta_of(*input->tensor).spec;
    if (scope.observer) scope.observer->redistributes(input->index, spec, *input->to, false);
    one_by_one |= intermediate_spec(spec, *input->to).get() != &spec;
    from.push_back(&spec);
    to.push_back(input->to);
  }
  std::vector<redistribute::Local> results;
  if (one_by_one) {
    for (size_t i = 0; i < open.size(); i++) results.push_back(redistribute_one(*open[i]->tensor, *from[i], *to[i]));
  } else {
    std::vector<const redistribute::Plan*> plans;
    std::vector<at::Tensor> locals;
    for (size_t i = 0; i < open.size(); i++) {
      plans.push_back(&redistribute::plan_between(*from[i], *to[i]));
      locals.push_back(local_of(*open[i]->tensor));
    }
    results = redistribute::execute_many(plans, locals, from, to);
  }
  for (size_t i = 0; i < open.size(); i++) {
    if (results[i].pending) funcol::wait(results[i].tensor, results[i].pending);
    open[i]->local = expanded_like(std::move(results[i].tensor), *to[i]);
    cache_result(*open[i]->tensor, *open[i], *from[i]);
  }
}

}  // namespace tessera::detail
