#include "tessera/data_parallel/detail/join.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/collective_label.h"

#include <ATen/ops/zeros.h>

namespace tessera::data_parallel {

void Join::exchange(Phase mine) {
  auto all = at::zeros({group_->size()}, at::TensorOptions(device_).dtype(at::kInt));
  all[group_->rank()].fill_(static_cast<int32_t>(mine));
  const comm::CollectiveLabel label("join: what each rank does next", 0x6A6F696E);
  group_->all_reduce(all, ReduceOp::Sum).wait();
  all = all.cpu();
  phases_.clear();
  active_ = 0;
  for (int64_t r = 0; r < group_->size(); r++) {
    phases_.push_back(static_cast<Phase>(all.data_ptr<int32_t>()[r]));
    const auto phase = phases_.back();
    if (phase == Phase::JoinedLast) last_joiner_ = r;
    if (phase != Phase::Forward && phase != Phase::Backward) continue;
    active_++;
    last_active_ = r;
  }
  if (active_ == 0) return;
  const auto expected = phases_[static_cast<size_t>(last_active_)];
  std::vector<int64_t> forward, backward, joined;
  for (size_t r = 0; r < phases_.size(); r++)
    (phases_[r] == Phase::Forward    ? forward
     : phases_[r] == Phase::Backward ? backward
                                     : joined)
        .push_back(group_->ranks()[r]);
  TESSERA_CHECK(expected == Phase::Forward ? backward.empty() : forward.empty(), UsageError, "join: ranks ",
                c10::IntArrayRef(forward), " run a forward and ranks ", c10::IntArrayRef(backward),
                " a backward. In each iteration, all ranks that have a batch must run the same passes");
  TESSERA_CHECK(!options_.throw_on_early_termination || joined.empty(), UsageError, "join: ranks ",
                c10::IntArrayRef(joined), " have no more batches, and throw_on_early_termination is set. This is rank ",
                group_->ranks()[static_cast<size_t>(group_->rank())]);
}

void Join::announce(Phase phase) { exchange(phase); }

Join::Phase Join::shadow() {
  exchange(shadowed_ ? Phase::Joined : Phase::JoinedLast);
  if (active_ == 0) return Phase::Joined;
  shadowed_ = true;
  return phases_[static_cast<size_t>(last_active_)];
}

double Join::scale() const {
  return 1.0 / static_cast<double>(options_.divide_by_initial_world_size ? group_->size() : active_);
}

}  // namespace tessera::data_parallel
