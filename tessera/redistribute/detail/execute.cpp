#include "tessera/redistribute/detail/execute.h"

#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/redistribute/detail/last_shard.h"
#include "tessera/redistribute/detail/partial_values.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <numeric>

// Each step changes the placement of one axis, or reduces over several axes. Between steps the tensor is the local
// tensor for the placements `state_`. A collective step has three parts. So several tensors can share the second part:
//
//   begin     waits for the collective in flight; brings the tensor into the order and form in which it is sent
//   post      one collective, for one tensor or for several
//   end       leaves the collective in flight, unless its result must be reordered or converted back
namespace tessera::redistribute {
namespace {

using detail::LastShard;
using detail::Lengths;
using tessera::detail::MeshState;

// The redistribution of one tensor: its plan, the current step and the current local tensor.
class Redistribution {
 public:
  Redistribution(const Plan& plan, const at::Tensor& local, const TensorSpec& from, const TensorSpec& to)
      : plan_(plan), mesh_(*from.mesh.state()), sizes_(from.sizes), state_(from.placements), x_(local) {
    // Collectives read memory, and the memory of conj() and of imag() of it has other values.
    if (C10_UNLIKELY(!plan.steps.empty() && (local.is_conj() || local.is_neg())))
      x_ = local.resolve_conj().resolve_neg();
    if (!to.prototype->is_contiguous() && !plan.steps.empty())
      set_memory_order(strides_in_order_of(to.sizes, to.strides));
  }

  const PlanStep* next() const { return at_ < plan_.steps.size() ? &plan_.steps[at_] : nullptr; }
  c10::ScalarType dtype() const { return x_.scalar_type(); }
  bool is_on_mesh_of(const Redistribution& other) const { return &mesh_ == &other.mesh_; }

  comm::Group group() const {
    const auto& axes = next()->axes;
    if (axes.size() == 1) return mesh_.groups[axes[0]];
    for (auto axis : axes)  // if one axis has all the ranks, its group is the joint group
      if (mesh_.shape[axis] == ranks()) return mesh_.groups[axis];
    return mesh_.joint_group({axes.begin(), axes.end()});
  }

  // The tensor that the collective sends. If it scatters or gathers: along which dim, with which length per rank.
  struct CollectiveInput {
    at::Tensor x;
    int64_t dim = 0;
    Lengths lengths;
  };

  CollectiveInput begin() {
    wait_pending();
    const auto& step = *next();
    switch (step.move) {
      case Move::AllReduce:
        return {detail::to_wire(x_, step.from, ranks()), 0, {}};
      case Move::AllGather: {
        auto shard = shard_before();
        return {x_, wire_dim(shard.dim), shard.lengths()};
      }
      case Move::ReduceScatter: {
        auto shard = shard_after();
        auto sent = detail::to_wire(x_, step.from, ranks());
        return {detail::to_rank_order(sent, wire_dim(shard.dim), shard), wire_dim(shard.dim), shard.lengths()};
      }
      default:
        TESSERA_FAIL(InternalError, "no collective input for step ", to_string(step.move));
    }
  }

  void end(at::Tensor result, comm::Group group) {
    const auto& step = *next();
    x_ = std::move(result);
    pending_ = std::move(group);
    if (step.move == Move::AllGather) {
      if (step.from.is_shard()) return advance();
      auto shard = shard_before();
      if (!shard.same_order()) {
        wait_pending();
        x_ = detail::to_position_order(x_, wire_dim(shard.dim), shard);
      }
    } else if (detail::needs_from_wire(step.from, dtype())) {
      wait_pending();
      x_ = detail::from_wire(x_, step.from, ranks());
    }
    advance();
  }

  // Runs the next step for this tensor alone.
  void run_step() {
    const auto& step = *next();
    switch (step.move) {
      case Move::Nothing:
        return advance();
      case Move::Slice: {
        wait_pending();
        auto shard = shard_after();
        x_ = detail::own_shard(x_, wire_dim(shard.dim), shard);
        return advance();
      }
      case Move::Divide:
        wait_pending();
        x_ = detail::make_partial(x_, step.to, ranks(), mesh_.coordinate[step.axes[0]]);
        return advance();
      case Move::AllReduce: {
        auto input = begin();
        auto over = group();
        return end(funcol::all_reduce(input.x, detail::wire_op(step.from), over), over);
      }
      case Move::AllGather: {
        auto input = begin();
        auto over = group();
        return end(funcol::all_gather(input.x, input.dim, input.lengths, over), over);
      }
      case Move::ReduceScatter: {
        auto input = begin();
        auto over = group();
        return end(funcol::reduce_scatter(input.x, input.dim, input.lengths, detail::wire_op(step.from), over), over);
      }
      case Move::AllToAll:
        wait_pending();
        if (step.from.dim == step.to.dim)
          reshard_dim();
        else
          exchange_dims();
        return advance();
    }
  }

  Local finish() {
    if (!memory_order_.empty() && at_ > 0) {
      wait_pending();
      x_ = x_.permute(wire_dims_);
    }
    return {std::move(x_), std::move(pending_)};
  }

 private:
  // S(i) -> S(j)
  void exchange_dims() {
    auto before = shard_before(), after = shard_after();
    auto sent = detail::to_rank_order(x_, wire_dim(after.dim), after);
    auto over = group();
    x_ = funcol::all_to_all(sent, wire_dim(after.dim), after.lengths(), wire_dim(before.dim), before.lengths(), over);
    pending_ = std::move(over);
    if (before.same_order()) return;
    wait_pending();
    x_ = detail::to_position_order(x_, wire_dim(before.dim), before);
  }

  // S(i) -> S(i), sharded in another way
  void reshard_dim() {
    auto before = shard_before(), after = shard_after();
    auto dim = wire_dim(before.dim);
    detail::ReshardExchange exchange(before, after);
    auto sent = detail::take(x_, dim, exchange.pack);
    auto over = group();
    x_ = funcol::all_to_all(sent, dim, exchange.sent, dim, exchange.received, over);
    pending_ = std::move(over);
    if (exchange.unpack.size() <= 1) return;
    wait_pending();
    x_ = detail::take(x_, dim, exchange.unpack);
  }

  int64_t ranks() const {
    int64_t n = 1;
    for (auto axis : next()->axes) n *= mesh_.shape[axis];
    return n;
  }

  LastShard shard_before() const { return {mesh_, state_, next()->axes[0], sizes_}; }
  LastShard shard_after() const {
    auto after = state_;
    after[next()->axes[0]] = next()->to;
    return {mesh_, after, next()->axes[0], sizes_};
  }

  void wait_pending() {
    if (!pending_) return;
    funcol::wait(x_, pending_);
    pending_.reset();
  }

  void advance() {
    for (auto axis : next()->axes) state_[axis] = next()->to;
    at_++;
  }

  // The result must have the memory order of the global strides, so the dims are sent in that order. `strides` are
  // dense.
  void set_memory_order(c10::IntArrayRef strides) {
    memory_order_.resize(strides.size());
    std::iota(memory_order_.begin(), memory_order_.end(), 0);
    std::stable_sort(memory_order_.begin(), memory_order_.end(),
                     [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
    wire_dims_.resize(strides.size());
    for (size_t i = 0; i < strides.size(); i++) wire_dims_[memory_order_[i]] = static_cast<int64_t>(i);
    if (plan_.only_relabels())
      memory_order_.clear();
    else
      x_ = x_.permute(memory_order_);
  }
  int64_t wire_dim(int64_t dim) const { return memory_order_.empty() ? dim : wire_dims_[dim]; }

  const Plan& plan_;
  MeshState& mesh_;
  c10::IntArrayRef sizes_;  // global
  Placements state_;
  at::Tensor x_;
  comm::Group pending_;
  size_t at_ = 0;
  Sizes memory_order_, wire_dims_;  // order in which dims are sent, and its inverse; empty: unchanged
};

// True if one collective can run the next steps of both tensors.
bool can_coalesce(const Redistribution& a, const Redistribution& b) {
  const auto &one = *a.next(), &other = *b.next();
  return one.move == other.move && one.axes == other.axes && a.dtype() == b.dtype() && a.is_on_mesh_of(b) &&
         (one.from.is_sharded() || detail::wire_op(one.from) == detail::wire_op(other.from));
}

bool is_coalescable(Move move) {
  return move == Move::AllReduce || move == Move::AllGather || move == Move::ReduceScatter;
}

void run_coalesced(c10::ArrayRef<Redistribution*> redistributions) {
  std::vector<at::Tensor> xs;
  std::vector<int64_t> dims, lengths;
  for (auto* redistribution : redistributions) {
    auto input = redistribution->begin();
    xs.push_back(std::move(input.x));
    dims.push_back(input.dim);
    lengths.insert(lengths.end(), input.lengths.begin(), input.lengths.end());
  }
  const auto& step = *redistributions[0]->next();
  auto over = redistributions[0]->group();
  std::vector<at::Tensor> results;
  if (step.move == Move::AllReduce)
    results = funcol::all_reduce_coalesced(xs, detail::wire_op(step.from), over);
  else if (step.move == Move::AllGather)
    results = funcol::all_gather_coalesced(xs, dims, lengths, over);
  else
    results = funcol::reduce_scatter_coalesced(xs, dims, lengths, detail::wire_op(step.from), over);
  for (size_t i = 0; i < redistributions.size(); i++) redistributions[i]->end(std::move(results[i]), over);
}

bool is_outside(const TensorSpec& spec) { return spec.mesh.state()->coordinate.empty(); }

}  // namespace

Local execute(const Plan& plan, const at::Tensor& local, const TensorSpec& from, const TensorSpec& to) {
  if (plan.steps.empty() || is_outside(from)) return {local, {}};
  if (plan.only_relabels() && C10_LIKELY(!local.is_conj() && !local.is_neg())) return {local, {}};
  RECORD_FUNCTION("tessera::redistribute", c10::ArrayRef<const c10::IValue>{});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Redistribution redistribution(plan, local, from, to);
  while (redistribution.next()) redistribution.run_step();
  return redistribution.finish();
}

std::vector<Local> execute_many(c10::ArrayRef<const Plan*> plans, at::TensorList locals,
                                c10::ArrayRef<const TensorSpec*> from, c10::ArrayRef<const TensorSpec*> to) {
  TESSERA_CHECK(plans.size() == locals.size() && from.size() == locals.size() && to.size() == locals.size(),
                InternalError, plans.size(), " plans for ", locals.size(), " tensors");
  RECORD_FUNCTION("tessera::redistribute_many", c10::ArrayRef<const c10::IValue>{});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  static const Plan kNothing;
  std::vector<Redistribution> redistributions;
  redistributions.reserve(locals.size());
  for (size_t i = 0; i < locals.size(); i++)
    redistributions.emplace_back(is_outside(*from[i]) ? kNothing : *plans[i], locals[i], *from[i], *to[i]);

  // The first tensor with steps left runs its next step, together with all others whose next step is the same. Every
  // rank has the same plans, so every rank posts the same collectives.
  std::vector<Redistribution*> together;
  for (auto& first : redistributions)
    while (first.next()) {
      if (!is_coalescable(first.next()->move)) {
        first.run_step();
        continue;
      }
      together.clear();
      for (auto& other : redistributions) {
        while (other.next() && !communicates(other.next()->move)) other.run_step();
        if (other.next() && can_coalesce(first, other)) together.push_back(&other);
      }
      if (together.size() == 1)
        first.run_step();
      else
        run_coalesced(together);
    }

  std::vector<Local> results;
  for (auto& redistribution : redistributions) results.push_back(redistribution.finish());
  return results;
}

}  // namespace tessera::redistribute
