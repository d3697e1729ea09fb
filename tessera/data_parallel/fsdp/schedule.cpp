#include "tessera/data_parallel/fsdp/schedule.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

bool has_frozen(const Unit& unit) {
  return std::any_of(unit.members().begin(), unit.members().end(),
                     [](const Member& member) { return !member.handle.requires_grad(); });
}

}  // namespace

void Schedule::add(std::shared_ptr<Turn> turn) {
  turn->unit->on_need([this, at = turn.get()] {
    if (in_backward()) before_backward(*at);
  });
  turns_.push_back(std::move(turn));
}

Turn* Schedule::neighbour(const Turn& turn, int step) const {
  const auto& order = last_order_;
  const auto found = std::find(order.begin(), order.end(), &turn);
  if (found == order.end()) return nullptr;
  const auto at = (found - order.begin()) + step;
  return at < 0 || at >= static_cast<ptrdiff_t>(order.size()) ? nullptr : order[static_cast<size_t>(at)];
}

void Schedule::prefetch(const Turn& turn, int direction) {
  for (int step = 1; step <= ahead; step++)
    if (auto* next = neighbour(turn, direction * step); next && !next->unit->reducing()) next->unit->gather();
}

void Schedule::before_forward(Turn& turn) {
  if (in_backward()) return turn.unit->open();
  if (running_.empty()) {  // the root's
    if (task_ != -1) abandon();
    order_.clear();
  }
  running_.push_back(&turn);
  if (std::find(order_.begin(), order_.end(), &turn) == order_.end()) order_.push_back(&turn);
  turn.unit->open();
  if (prefetch_forward) prefetch(turn, 1);
}

void Schedule::after_forward(Turn& turn, const Tensors& outputs) {
  if (in_backward()) return;
  running_.pop_back();
  bool graph = false;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    graph = true;
    output.register_hook([self = shared_from_this(), at = &turn](const at::Tensor&) { self->before_backward(*at); });
  }
  const bool root = running_.empty();
  if (root) last_order_ = order_;
  if (!graph || (turn.reshard_after_forward && !root)) turn.unit->close();
  if (root && !graph)
    for (auto& other : turns_) other->unit->close();
}

void Schedule::forward_failed() {
  if (in_backward()) return;
  running_.pop_back();
  if (running_.empty()) abandon();
}

void Schedule::before_backward(Turn& turn) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task_ != task) {
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
  if (!turn.unit->in_backward() && !turn.unit->reducing())
    turn.unit->begin_backward([this, at = &turn] {
      complete(*at);
      if (prefetch_backward == BackwardPrefetch::Post) prefetch(*at, -1);
    });
  turn.unit->open();
  if (prefetch_backward == BackwardPrefetch::Pre) prefetch(turn, -1);
}

void Schedule::complete(Turn& turn) {
  if (!has_frozen(*turn.unit)) turn.unit->close();
  if (!turn.sync) return turn.unit->end_backward();
  turn.unit->post_reduction();
  if (!turn.unit->reducing()) return;
  reducing_.push_back(&turn);
  while (reducing_.size() > 1) {
    reducing_.front()->unit->finish_reduction();
    reducing_.pop_front();
  }
}

void Schedule::end_of_backward() {
  for (auto& turn : turns_)
    if (turn->unit->in_backward()) complete(*turn);
  for (auto* turn : reducing_) turn->unit->finish_reduction();
  reducing_.clear();
  for (auto& turn : turns_) turn->unit->close();
  task_ = -1;
}

void Schedule::abandon() {
  task_ = -1;
  running_.clear();
  reducing_.clear();
  for (auto& turn : turns_) turn->unit->abandon();
}

}  // namespace tessera::data_parallel::fsdp
