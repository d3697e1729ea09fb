#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"

#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/detail/engine/compiled_step.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

constexpr size_t kMostReducing = 2;  // the newest over shards, the one before over replicas

int current_task() { return torch::autograd::get_current_graph_task_id(); }
bool in_backward() { return current_task() != -1; }

bool has_frozen(const Unit& unit) {
  return std::any_of(unit.members().begin(), unit.members().end(),
                     [](const Member& member) { return !member.handle.requires_grad(); });
}

template <class T>
bool contains(const std::vector<T>& list, T item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

}  // namespace

void Schedule::add(std::shared_ptr<Turn> turn, std::string name) {
  turn->unit->place({std::move(name), static_cast<int32_t>(turns_.size()), streams_, arena_});
  // What autograd has saved may outlive the modules.
  turn->unit->on_need([weak = weak_from_this(), at = turn.get()](bool values) {
    const auto self = weak.lock();
    if (self && in_backward()) self->before_backward(*at, values);
  });
  last_order_.push_back(turn.get());
  turns_.push_back(std::move(turn));
}

Turn* Schedule::neighbour(const Turn& turn, int step) const {
  const auto& order = last_order_;
  const auto found = std::find(order.begin(), order.end(), &turn);
  if (found == order.end()) return nullptr;
  const auto at = (found - order.begin()) + step;
  return at < 0 || at >= static_cast<ptrdiff_t>(order.size()) ? nullptr : order[static_cast<size_t>(at)];
}

// Gathers what comes next, unless it has been there.
void Schedule::prefetch(Turn& turn, const std::vector<std::weak_ptr<Turn>>& asked, int step) {
  std::vector<Turn*> next;
  for (const auto& each : asked)
    if (const auto other = each.lock()) next.push_back(other.get());
  if (asked.empty())
    for (int n = 1; n <= turn.ahead; n++) next.push_back(neighbour(turn, step * n));
  for (auto* other : next) {
    if (!other) continue;
    const bool over = step > 0 ? contains(order_, other) : other->task == task_ || !other->unshard_in_backward;
    if (!over && !other->unit->reducing()) other->unit->gather();
  }
}

// All of the tree: one that is not called may still be gathered, or let go of.
void Schedule::note_in_compiled_step() {
  if (std::exchange(compiled_in_, CompilingScope::serial()) != CompilingScope::serial())
    CompilingScope::on_trace_end([self = shared_from_this(), order = order_, last_order = last_order_](bool) {
      self->order_ = order;
      self->last_order_ = last_order;
      self->running_.clear();
      self->reducing_.clear();
      self->arena_->clear();
      self->depth_ = 0;
      self->task_ = -1;
    });
  for (const auto& turn : turns_) fsdp::note_in_compiled_step(turn);
}

void Schedule::before_forward(Turn& turn) {
  if (in_backward()) return turn.unit->open();
  if (compiling()) note_in_compiled_step();
  if (depth_++ == 0) {
    if (task_ != -1) abandon(), depth_ = 1;
    if (&turn == &root()) order_.clear();  // else: part of the model by itself, after the whole of it say
  }
  if (!contains(running_, &turn)) running_.push_back(&turn);
  if (!contains(order_, &turn)) order_.push_back(&turn);
  turn.unit->open();
  if (turn.prefetch_forward || !turn.forward_prefetch.empty()) prefetch(turn, turn.forward_prefetch, 1);
}

void Schedule::after_forward(Turn& turn, const void* module, const Tensors& outputs) {
  if (in_backward()) return;
  depth_--;
  bool graph = false;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    graph = true;
    output.register_hook(
        [self = shared_from_this(), at = &turn](const at::Tensor&) { self->before_backward(*at, true); });
  }
  if (!contains(turn.ran, module)) turn.ran.push_back(module);
  if (turn.ran.size() == turn.calls) end_of_forward(turn, graph);
  if (depth_ > 0) return;
  while (!running_.empty()) end_of_forward(*running_.back(), graph);  // modules of theirs were not called
  last_order_ = order_;
  for (auto& other : turns_)
    if (!other->unit->is_open() && other->unit->is_gathered() && !contains(order_, other.get())) other->unit->close();
  arena_->clear();
}

void Schedule::end_of_forward(Turn& turn, bool graph) {
  std::erase(running_, &turn);
  turn.ran.clear();
  const bool reshard = turn.reshard_after_forward.value_or(&turn != &root());
  if (graph && !reshard) return;
  if (graph && turn.few) return turn.unit->close_keeping_part(turn.few);
  const bool stay = turn.reshard_after_forward && !reshard;  // asked for: whole in the next one, too
  stay ? turn.unit->hide() : turn.unit->close();
}

void Schedule::forward_failed() {
  if (in_backward()) return;
  if (depth_ == 0 || --depth_ == 0) abandon();
}

void Schedule::begin_task(int task) {
  if (task_ == task) return;
  if (task_ != -1) abandon();
  task_ = task;
  // Runs at the end of this backward; or, if that fails, when its record is thrown away.
  struct AtEnd {
    std::shared_ptr<Schedule> self;
    int task;
    AtEnd(std::shared_ptr<Schedule> self, int task) : self(std::move(self)), task(task) {}
    AtEnd(const AtEnd&) = delete;
    ~AtEnd() {
      if (self->task_ == task) self->abandon();
    }
  };
  auto at_end = std::make_shared<AtEnd>(shared_from_this(), task);
  torch::autograd::Engine::get_default_engine().queue_callback([at_end] { at_end->self->end_of_backward(); });
}

void Schedule::before_backward(Turn& turn, bool values) {
  auto& unit = *turn.unit;
  TESSERA_CHECK(
      !compiling() || turn.compiled_in == CompilingScope::serial(), UsageError, "unit ", unit.name(),
      ": the backward of a sharded module cannot be compiled by itself; compile the whole step: compile(step)");
  begin_task(current_task());
  const bool first = turn.task != task_;
  if (!first && (!values || unit.is_open())) return;
  if (first)
    while (unit.reducing() && !reducing_.empty()) finish_one();  // of a backward that was not the last
  if (values && turn.unshard_in_backward) unit.open();
  if (!first) return;
  turn.task = task_;
  unit.begin_backward([this, at = &turn] { complete(*at); });
  // Those behind have all their gradients, and stay for frozen parameters alone. If need be they are opened again.
  bool behind = false;
  for (auto* other : last_order_) {
    if (behind && other->task == task_ && other->unit->is_open() && !other->unit->waits_for_gradients())
      release(*other);
    behind |= other == &turn;
  }
  if (turn.prefetch_backward == BackwardPrefetch::Pre || !turn.backward_prefetch.empty())
    prefetch(turn, turn.backward_prefetch, -1);
}

void Schedule::release(Turn& turn) { turn.reshard_after_backward ? turn.unit->close() : turn.unit->hide(); }

void Schedule::complete(Turn& turn) {
  auto& unit = *turn.unit;
  if (!has_frozen(unit)) release(turn);
  if (turn.prefetch_backward == BackwardPrefetch::Post) prefetch(turn, turn.backward_prefetch, -1);
  if (!turn.sync) return unit.end_backward();
  unit.post_reduction(turn.all_reduce);
  if (!unit.reducing()) return;
  for (auto* before : reducing_) before->unit->post_all_reduce();
  reducing_.push_back(&turn);
  while (reducing_.size() > kMostReducing || (reducing_.size() > 1 && !reducing_.front()->unit->replicas()))
    finish_one();
}

void Schedule::finish_one() {
  auto* turn = reducing_.front();
  reducing_.pop_front();
  turn->unit->finish_reduction();
}

void Schedule::end_of_backward() {
  for (auto& turn : turns_)
    if (turn->unit->in_backward()) complete(*turn);
  while (root().is_last_backward && !reducing_.empty()) finish_one();
  for (auto& turn : turns_)
    if (turn->unit->is_open() || turn->reshard_after_backward) release(*turn);
  arena_->clear();
  task_ = -1;
}

void Schedule::abandon() {
  task_ = -1;
  depth_ = 0;
  running_.clear();
  reducing_.clear();
  for (auto& turn : turns_) {
    turn->ran.clear();
    turn->unit->abandon();
  }
  arena_->clear();
}

}  // namespace tessera::data_parallel::fsdp
