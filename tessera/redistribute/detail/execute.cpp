#include "tessera/redistribute/detail/execute.h"

#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/redistribute/detail/last_shard.h"
#include "tessera/redistribute/detail/partial_values.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <numeric>

// Each step changes the placement of one axis (or reduces over several). Between steps a tensor on its way is the piece
// that `state` describes. A collective step has three parts, so that many tensors can share the middle one:
//
//   begin     wait for what is under way, bring the tensor into the order and form in which it is sent
//   post      one collective, for one tensor or for many
//   end       leave it under way, unless its result has to be reordered or its terms unpacked
namespace tessera::redistribute {
namespace {

using detail::LastCut;
using detail::Lengths;
using tessera::detail::MeshState;

class Traveller {
 public:
  Traveller(const Plan& plan, const at::Tensor& local, const TensorSpec& from, const TensorSpec& to)
      : plan_(plan), mesh_(*from.mesh.state()), sizes_(from.sizes), state_(from.placements), x_(local) {
    if (!to.stamp->is_contiguous() && !plan.steps.empty()) set_memory_order(to.strides);
  }

  const Step* next() const { return at_ < plan_.steps.size() ? &plan_.steps[at_] : nullptr; }
  c10::ScalarType dtype() const { return x_.scalar_type(); }
  bool is_on_mesh_of(const Traveller& other) const { return &mesh_ == &other.mesh_; }

  comm::Group group() const {
    const auto& axes = next()->axes;
    if (axes.size() == 1) return mesh_.groups[axes[0]];
    for (auto axis : axes)  // axes of one rank add nobody
      if (mesh_.shape[axis] == ranks()) return mesh_.groups[axis];
    return mesh_.joint_group({axes.begin(), axes.end()});
  }

  // What the middle part sends; dim and lengths where it cuts or joins.
  struct Parcel {
    at::Tensor x;
    int64_t dim = 0;
    Lengths lengths;
  };

  Parcel begin() {
    settle();
    const auto& step = *next();
    switch (step.move) {
      case Move::AllReduce:
        return {detail::to_wire(x_, step.from, ranks()), 0, {}};
      case Move::AllGather: {
        auto cut = cut_before();
        return {x_, where(cut.dim), cut.lengths()};
      }
      case Move::ReduceScatter: {
        auto cut = cut_after();
        auto sent = detail::to_wire(x_, step.from, ranks());
        return {detail::to_rank_order(sent, where(cut.dim), cut), where(cut.dim), cut.lengths()};
      }
      default:
        TESSERA_FAIL(InternalError, "no parcel for ", to_string(step.move));
    }
  }

  void end(at::Tensor result, comm::Group group) {
    const auto& step = *next();
    x_ = std::move(result);
    pending_ = std::move(group);
    if (step.move == Move::AllGather) {
      if (step.from.is_shard()) return advance();
      auto cut = cut_before();
      if (!cut.same_order()) {
        settle();
        x_ = detail::to_position_order(x_, where(cut.dim), cut);
      }
    } else if (detail::needs_from_wire(step.from, dtype())) {
      settle();
      x_ = detail::from_wire(x_, step.from, ranks());
    }
    advance();
  }

  // A step that nobody shares.
  void run_alone() {
    const auto& step = *next();
    switch (step.move) {
      case Move::Nothing:
        return advance();
      case Move::Slice: {
        settle();
        auto cut = cut_after();
        x_ = detail::own_piece(x_, where(cut.dim), cut);
        return advance();
      }
      case Move::Divide:
        settle();
        x_ = detail::make_term(x_, step.to, ranks(), mesh_.coordinate[step.axes[0]]);
        return advance();
      case Move::AllReduce: {
        auto parcel = begin();
        auto over = group();
        return end(funcol::all_reduce(parcel.x, detail::wire_op(step.from), over), over);
      }
      case Move::AllGather: {
        auto parcel = begin();
        auto over = group();
        return end(funcol::all_gather(parcel.x, parcel.dim, parcel.lengths, over), over);
      }
      case Move::ReduceScatter: {
        auto parcel = begin();
        auto over = group();
        return end(funcol::reduce_scatter(parcel.x, parcel.dim, parcel.lengths, detail::wire_op(step.from), over),
                   over);
      }
      case Move::AllToAll:
        settle();
        if (step.from.dim == step.to.dim)
          cut_anew();
        else
          exchange_dims();
        return advance();
    }
  }

  Local finish() {
    if (!memory_order_.empty() && at_ > 0) {
      settle();
      x_ = x_.permute(where_);
    }
    return {std::move(x_), std::move(pending_)};
  }

 private:
  // S(i) -> S(j)
  void exchange_dims() {
    auto before = cut_before(), after = cut_after();
    auto sent = detail::to_rank_order(x_, where(after.dim), after);
    auto over = group();
    x_ = funcol::all_to_all(sent, where(after.dim), after.lengths(), where(before.dim), before.lengths(), over);
    pending_ = std::move(over);
    if (before.same_order()) return;
    settle();
    x_ = detail::to_position_order(x_, where(before.dim), before);
  }

  // S(i) -> S(i), cut in another way
  void cut_anew() {
    auto before = cut_before(), after = cut_after();
    auto dim = where(before.dim);
    detail::Exchange exchange(before, after);
    auto sent = detail::take(x_, dim, exchange.pack);
    auto over = group();
    x_ = funcol::all_to_all(sent, dim, exchange.sent, dim, exchange.received, over);
    pending_ = std::move(over);
    if (exchange.unpack.size() <= 1) return;
    settle();
    x_ = detail::take(x_, dim, exchange.unpack);
  }

  int64_t ranks() const {
    int64_t n = 1;
    for (auto axis : next()->axes) n *= mesh_.shape[axis];
    return n;
  }

  LastCut cut_before() const { return {mesh_, state_, next()->axes[0], sizes_}; }
  LastCut cut_after() const {
    auto after = state_;
    after[next()->axes[0]] = next()->to;
    return {mesh_, after, next()->axes[0], sizes_};
  }

  void settle() {
    if (!pending_) return;
    funcol::wait(x_, pending_);
    pending_.reset();
  }

  void advance() {
    for (auto axis : next()->axes) state_[axis] = next()->to;
    at_++;
  }

  // The result must lie in memory in the order that the global strides tell: the dims travel in that order.
  void set_memory_order(c10::IntArrayRef strides) {
    memory_order_.resize(strides.size());
    std::iota(memory_order_.begin(), memory_order_.end(), 0);
    std::stable_sort(memory_order_.begin(), memory_order_.end(),
                     [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
    where_.resize(strides.size());
    for (size_t i = 0; i < strides.size(); i++) where_[memory_order_[i]] = static_cast<int64_t>(i);
    bool only_relabels = std::all_of(plan_.steps.begin(), plan_.steps.end(),
                                     [](const Step& step) { return step.move == Move::Nothing; });
    if (only_relabels)
      memory_order_.clear();
    else
      x_ = x_.permute(memory_order_);
  }
  int64_t where(int64_t dim) const { return memory_order_.empty() ? dim : where_[dim]; }

  const Plan& plan_;
  MeshState& mesh_;
  c10::IntArrayRef sizes_;  // global
  Placements state_;
  at::Tensor x_;
  comm::Group pending_;
  size_t at_ = 0;
  Sizes memory_order_, where_;  // dims as they travel, and the inverse; empty: as they are
};

// Can two tensors take their next steps in one collective?
bool can_share(const Traveller& a, const Traveller& b) {
  const auto &one = *a.next(), &other = *b.next();
  return one.move == other.move && one.axes == other.axes && a.dtype() == b.dtype() && a.is_on_mesh_of(b) &&
         (one.from.is_sharded() || detail::wire_op(one.from) == detail::wire_op(other.from));
}

bool is_shareable(Move move) {
  return move == Move::AllReduce || move == Move::AllGather || move == Move::ReduceScatter;
}

void run_together(c10::ArrayRef<Traveller*> travellers) {
  std::vector<at::Tensor> xs;
  std::vector<int64_t> dims, lengths;
  for (auto* traveller : travellers) {
    auto parcel = traveller->begin();
    xs.push_back(std::move(parcel.x));
    dims.push_back(parcel.dim);
    lengths.insert(lengths.end(), parcel.lengths.begin(), parcel.lengths.end());
  }
  const auto& step = *travellers[0]->next();
  auto over = travellers[0]->group();
  std::vector<at::Tensor> results;
  if (step.move == Move::AllReduce)
    results = funcol::all_reduce_coalesced(xs, detail::wire_op(step.from), over);
  else if (step.move == Move::AllGather)
    results = funcol::all_gather_coalesced(xs, dims, lengths, over);
  else
    results = funcol::reduce_scatter_coalesced(xs, dims, lengths, detail::wire_op(step.from), over);
  for (size_t i = 0; i < travellers.size(); i++) travellers[i]->end(std::move(results[i]), over);
}

bool is_outside(const TensorSpec& spec) { return spec.mesh.state()->coordinate.empty(); }

}  // namespace

Local execute(const Plan& plan, const at::Tensor& local, const TensorSpec& from, const TensorSpec& to) {
  if (plan.steps.empty() || is_outside(from)) return {local, {}};
  RECORD_FUNCTION("tessera::redistribute", c10::ArrayRef<const c10::IValue>{});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Traveller traveller(plan, local, from, to);
  while (traveller.next()) traveller.run_alone();
  return traveller.finish();
}

std::vector<Local> execute_many(c10::ArrayRef<const Plan*> plans, at::TensorList locals,
                                c10::ArrayRef<const TensorSpec*> from, c10::ArrayRef<const TensorSpec*> to) {
  TESSERA_CHECK(plans.size() == locals.size() && from.size() == locals.size() && to.size() == locals.size(),
                InternalError, plans.size(), " plans for ", locals.size(), " tensors");
  RECORD_FUNCTION("tessera::redistribute_many", c10::ArrayRef<const c10::IValue>{});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  static const Plan kStay;
  std::vector<Traveller> travellers;
  travellers.reserve(locals.size());
  for (size_t i = 0; i < locals.size(); i++)
    travellers.emplace_back(is_outside(*from[i]) ? kStay : *plans[i], locals[i], *from[i], *to[i]);

  // The first that is not there yet takes its next step, with all others whose next step is the same. Every rank sees
  // the same plans, so every rank posts the same collectives.
  std::vector<Traveller*> together;
  for (auto& first : travellers)
    while (first.next()) {
      if (!is_shareable(first.next()->move)) {
        first.run_alone();
        continue;
      }
      together.clear();
      for (auto& other : travellers) {
        while (other.next() && !communicates(other.next()->move)) other.run_alone();
        if (other.next() && can_share(first, other)) together.push_back(&other);
      }
      if (together.size() == 1)
        first.run_alone();
      else
        run_together(together);
    }

  std::vector<Local> results;
  for (auto& traveller : travellers) results.push_back(traveller.finish());
  return results;
}

}  // namespace tessera::redistribute
