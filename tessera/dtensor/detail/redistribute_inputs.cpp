#include "tessera/dtensor/detail/redistribute_inputs.h"

#include "tessera/tracing/detail/tracer_key.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/dtensor/detail/observer.h"
#include "tessera/dtensor/policy.h"
#include "tessera/redistribute/detail/execute.h"

#include <c10/util/StringUtil.h>

namespace tessera::detail {

using propagate::OpEntry;

namespace {

// A value that is used again is worth keeping in its new place. A whole parameter is not: it would stay gathered. Nor
// is one whose piece is in plain hands: a rank that writes to it would move it again while its peers recall.
bool worth_remembering(const at::Tensor& t, const TensorSpec& from) {
  return !meta_of(t).escaped && !t.is_inference() && (from.has_partial() || !t.is_leaf());
}

bool recall(const at::Tensor& t, Moved& moved) {
  auto& meta = meta_of(t);
  if (tracing() || meta.escaped || !meta.remembered.defined() || meta.remembered_spec.get() != moved.to ||
      meta.local.is_inference() || meta.remembered_version != meta.local._version() ||
      meta.remembered_own_version != meta.remembered._version())
    return false;
  moved.local = meta.remembered;
  return true;
}

void remember(const at::Tensor& t, const Moved& moved, const TensorSpec& from) {
  auto& meta = meta_of(t);
  if (!worth_remembering(t, from) || meta.local.is_inference() || moved.local.is_inference() ||
      moved.local.is_same(meta.local))
    return;
  meta.remembered = moved.local;
  meta.remembered_spec = SpecRef::reclaim_copy(moved.to);
  meta.remembered_version = meta.local._version();
  meta.remembered_own_version = meta.remembered._version();
}

// A cut tensor that is to be a term of a sum is gathered first: no single plan does both. (A gradient that comes cut,
// added to one that is a pending sum.)
SpecRef gathered_first(const TensorSpec& from, const TensorSpec& to) {
  Placements via(from.placements);
  for (size_t a = 0; a < via.size(); a++)
    if (via[a].is_sharded() && to.placements[a].is_partial()) via[a] = Replicate();
  return with_placements(from, via);
}

redistribute::Local move_one(const at::Tensor& t, const TensorSpec& from, const TensorSpec& to) {
  auto local = local_of(t);
  const auto via = gathered_first(from, to);
  if (via.get() == &from) return redistribute::execute(redistribute::plan_between(from, to), local, from, to);
  auto whole = redistribute::execute(redistribute::plan_between(from, *via), local, from, *via);
  if (whole.pending) funcol::wait(whole.tensor, whole.pending);
  return redistribute::execute(redistribute::plan_between(*via, to), whole.tensor, *via, to);
}

// Tells the observer that the moves are over, also when one throws.
struct Told {
  OpObserver* observer = op_observer();
  ~Told() {
    if (observer) observer->redistributed();
  }
};

void ask_policy(const OpEntry& entry, const Moved& move, const TensorSpec& from) {
  if (comm_policy() == CommPolicy::Allow) return;
  const auto via = gathered_first(from, *move.to);
  const bool communicates = via.get() != &from || redistribute::plan_between(from, *move.to).communicates();
  if (communicates)
    check_policy(c10::str(entry.name, " redistributes its tensor ", move.index, ", ", from.describe(), ", to ",
                          to_string(move.to->placements), "."));
}

}  // namespace

void move_all(const OpEntry& entry, std::vector<Moved>& moves) {
  std::vector<Moved*> open;
  for (auto& move : moves)
    if (!recall(*move.tensor, move)) open.push_back(&move);
  if (open.empty()) return;
  for (const auto* move : open) ask_policy(entry, *move, *meta_of(*move->tensor).spec);

  Told told;
  bool alone = open.size() == 1;
  std::vector<const redistribute::Plan*> plans;
  std::vector<at::Tensor> locals;
  std::vector<const TensorSpec*> from, to;
  for (auto* move : open) {
    const auto& spec = *meta_of(*move->tensor).spec;
    if (told.observer) told.observer->redistributes(move->index, spec, *move->to, false);
    alone |= gathered_first(spec, *move->to).get() != &spec;
    from.push_back(&spec);
    to.push_back(move->to);
  }
  std::vector<redistribute::Local> results;
  if (alone) {
    for (size_t i = 0; i < open.size(); i++) results.push_back(move_one(*open[i]->tensor, *from[i], *to[i]));
  } else {
    for (size_t i = 0; i < open.size(); i++) {
      plans.push_back(&redistribute::plan_between(*from[i], *to[i]));
      locals.push_back(local_of(*open[i]->tensor));
    }
    results = redistribute::execute_many(plans, locals, from, to);
  }
  for (size_t i = 0; i < open.size(); i++) {
    if (results[i].pending) funcol::wait(results[i].tensor, results[i].pending);
    open[i]->local = std::move(results[i].tensor);
    remember(*open[i]->tensor, *open[i], *from[i]);
  }
}

}  // namespace tessera::detail
