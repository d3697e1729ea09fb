#include "tessera/data_parallel/fsdp/summon_full_params.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"
#include "tessera/nn/module_tree.h"
#include "tessera/state/detail/fit_value.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <exception>

namespace tessera::data_parallel::fsdp {
namespace {

constexpr const char* kSummon = "summon_full_params";

// ---- detects lost changes by fingerprints

// A hash of the bits, so that NaNs and the order of elements count.
int64_t fingerprint(const at::Tensor& t) {
  const auto plain = t.detach().contiguous().cpu();
  const auto* at = static_cast<const char*>(plain.const_data_ptr());
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (size_t left = plain.nbytes(); left > 0;) {
    uint64_t word = 0;
    const size_t bytes = std::min(left, sizeof(word));
    std::memcpy(&word, at, bytes);
    hash = (hash ^ word) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
    at += bytes;
    left -= bytes;
  }
  return static_cast<int64_t>(hash);
}

// For each parameter and each rank: the fingerprint of that rank's part of the unsharded value that this rank has.
at::Tensor fingerprint_unsharded(const ParamGroup& group) {
  const auto& params = group.params();
  auto table = at::empty({static_cast<int64_t>(params.size()), group.shard_group()->size()}, at::kLong);
  auto cells = table.accessor<int64_t, 2>();
  for (size_t i = 0; i < params.size(); i++)
    for (int64_t r = 0; r < table.size(1); r++)
      cells[static_cast<int64_t>(i)][r] =
          fingerprint(group.layout().shard_of(i, local_or_self(params[i].tensor).detach(), r));
  return table;
}

// For each parameter: the fingerprint of this rank's shard.
at::Tensor fingerprint_shards(const ParamGroup& group) {
  auto table = at::empty({static_cast<int64_t>(group.params().size())}, at::kLong);
  for (int64_t i = 0; i < table.size(0); i++) {
    const auto range = group.layout().range_in_shard(static_cast<size_t>(i), group.shard_group()->rank());
    table.accessor<int64_t, 1>()[i] = fingerprint(group.flat_param().detach().narrow(0, range.begin, range.size));
  }
  return table;
}

at::Tensor gather_table(const ParamGroup& group, const at::Tensor& table, const comm::Group& ranks) {
  const auto own = table.to(group.device());
  auto sizes = table.sizes().vec();
  sizes.insert(sizes.begin(), ranks->size());
  auto all = at::empty(sizes, own.options());
  comm::all_gather_into_(all, own, ranks);
  funcol::wait(all, ranks);
  return all.cpu();
}

// Describes a change that is lost because the owning rank did not make the same change; else "". Every rank gets the
// same result.
std::string find_lost_change(const ParamGroup& group, const at::Tensor& before, const at::Tensor& after) {
  const auto& params = group.params();
  const auto was = before.accessor<int64_t, 2>();
  if (const auto& ranks = group.shard_group(); ranks->size() > 1) {
    const auto all = gather_table(group, after, ranks);
    const auto now = all.accessor<int64_t, 3>();
    for (int64_t i = 0; i < all.size(1); i++)
      for (int64_t r = 0; r < ranks->size(); r++)
        for (int64_t owner = 0; owner < ranks->size(); owner++)
          if (now[r][i][owner] != was[i][owner] && now[r][i][owner] != now[owner][i][owner]) {
            const auto& name = params[static_cast<size_t>(i)].name;
            return c10::str("rank ", ranks->ranks()[static_cast<size_t>(r)], " changed ",
                            group.layout().range_in_param(static_cast<size_t>(i), owner), " of parameter ", name,
                            ", which rank ", ranks->ranks()[static_cast<size_t>(owner)],
                            " owns and did not change likewise: that change is lost. Make the same change on all "
                            "ranks, or change only this rank's own shard");
          }
  }
  if (const auto& ranks = group.replicate_group(); ranks && ranks->size() > 1) {
    const auto all = gather_table(group, after.select(1, group.shard_group()->rank()).contiguous(), ranks);
    const auto now = all.accessor<int64_t, 2>();
    for (int64_t i = 0; i < all.size(1); i++)
      for (int64_t r = 1; r < ranks->size(); r++)
        if (now[r][i] != now[0][i])
          return c10::str("ranks ", ranks->ranks()[0], " and ", ranks->ranks()[static_cast<size_t>(r)],
                          " are replicas with the same shard of parameter ", params[static_cast<size_t>(i)].name,
                          " and changed it differently. Make the same change on all ranks");
  }
  return "";
}

// With rank0_only: describes a write to a shard by another rank than 0; else "". Every rank gets the same result.
std::string find_write_to_shard(const ParamGroup& group, const at::Tensor& before) {
  auto changed = fingerprint_shards(group).ne(before).to(at::kLong);
  std::vector<comm::Group> comm_groups{group.shard_group()};
  if (group.replicate_group()) comm_groups.push_back(group.replicate_group());
  for (const auto& ranks : comm_groups) {
    if (ranks->size() == 1) continue;
    const auto all = gather_table(group, changed, ranks);
    const auto cells = all.accessor<int64_t, 2>();
    for (int64_t r = 0; r < all.size(0); r++)
      for (int64_t i = 0; i < all.size(1); i++)
        if (cells[r][i])
          return c10::str("rank ", ranks->ranks()[static_cast<size_t>(r)], " wrote to its shard of parameter ",
                          group.params()[static_cast<size_t>(i)].name,
                          " with rank0_only, where only rank 0 has full parameters and changes are discarded; turn "
                          "rank0_only off and set writeback");
  }
  return "";
}

// ---- one parameter group

bool is_rank0_of(const ParamGroup& group) {
  return group.shard_group()->rank() == 0 && (!group.replicate_group() || group.replicate_group()->rank() == 0);
}

}  // namespace

class SummonedGroup {
 public:
  SummonedGroup(std::shared_ptr<ShardedModule> sharded, const SummonOptions& options)
      : sharded_(std::move(sharded)), options_(options), unsharded_here_(!options.rank0_only || is_rank0_of(group())) {}

  void unshard() {
    const at::NoGradGuard no_grad;
    if (group().options().param_dtype) group().reshard();  // a buffer left by forward has another dtype
    sharded_->summoned = true;
    group().set_full_precision(true);
    if (!unsharded_here_) before_ = fingerprint_shards(group());
    group().wait_for_unshard();
    const auto gradients = options_.with_grads ? unsharded_gradients() : Tensors(group().params().size());
    if (!unsharded_here_) return group().reshard();
    if (options_.writeback) before_ = fingerprint_unsharded(group());
    for (size_t i = 0; i < group().params().size(); i++) {
      auto tensor = group().params()[i].tensor;
      sharded_grads_.push_back(std::exchange(tensor.mutable_grad(), {}));
      if (options_.offload_to_cpu && !group().device().is_cpu())
        tensor.set_data(wrap_unsharded(group().params()[i], local_or_self(tensor).detach().cpu()));
      if (gradients[i].defined()) tensor.mutable_grad() = gradients[i].to(local_or_self(tensor).device());
    }
    if (sharded_->registration) sharded_->registration->register_unflattened();
  }

  // Returns "" or a description of changes that are lost. With check = false it does not communicate.
  std::string reshard(bool check) {
    const at::NoGradGuard no_grad;
    if (!sharded_->summoned) return "";
    std::string error;
    if (unsharded_here_) {
      const auto after = check && options_.writeback ? fingerprint_unsharded(group()) : at::Tensor();
      if (options_.writeback) write_back_gradients();
      group().accept_writes(options_.writeback);
      group().reshard();
      for (size_t i = 0; i < sharded_grads_.size(); i++) group().params()[i].tensor.mutable_grad() = sharded_grads_[i];
      if (sharded_->registration) sharded_->registration->register_flat();
      if (after.defined()) error = find_lost_change(group(), before_, after);
    }
    group().set_full_precision(false);
    sharded_->summoned = false;
    if (check && options_.rank0_only)
      error = find_write_to_shard(group(), unsharded_here_ ? fingerprint_shards(group()) : before_);
    return error;
  }

 private:
  ParamGroup& group() const { return sharded_->group(); }

  // Requires: the parameters are unsharded. Does not set .grad.
  Tensors unsharded_gradients() const {
    const auto& params = group().params();
    Tensors sharded, unsharded(params.size());
    for (const auto& param : params) sharded.push_back(param.tensor.grad());
    if (!group().layout().is_flat()) {
      for (size_t i = 0; i < params.size(); i++)
        if (sharded[i].defined()) unsharded[i] = tessera::detail::fit_value(sharded[i], params[i].tensor);
      return unsharded;
    }
    // A rank whose shard has no element of a parameter has no gradient for it, but other ranks may. The ranks exchange
    // which gradients exist.
    auto exists = at::zeros({static_cast<int64_t>(params.size())}, at::kLong);
    for (size_t i = 0; i < params.size(); i++)
      exists.accessor<int64_t, 1>()[static_cast<int64_t>(i)] = sharded[i].defined();
    exists = max_over_ranks(group(), exists);
    const auto gathered = gather_shard(group(), make_shard(group(), sharded, group().flat_param().scalar_type()));
    for (size_t i = 0; i < params.size(); i++)
      if (exists[static_cast<int64_t>(i)].item<int64_t>())
        unsharded[i] = wrap_unsharded(params[i], param_in_gathered(group(), i, gathered).clone());
    return unsharded;
  }

  // Copies this rank's part of the unsharded gradients to the sharded ones.
  void write_back_gradients() {
    const auto rank = group().shard_group()->rank();
    for (size_t i = 0; i < sharded_grads_.size(); i++) {
      const auto& unsharded = group().params()[i].tensor.grad();
      if (!options_.with_grads || !unsharded.defined() || !sharded_grads_[i].defined()) continue;
      const auto shard = group().layout().shard_of(i, local_or_self(unsharded), rank);
      local_or_self(sharded_grads_[i]).copy_(shard.view(local_or_self(sharded_grads_[i]).sizes()));
    }
  }

  std::shared_ptr<ShardedModule> sharded_;
  SummonOptions options_;
  bool unsharded_here_;
  at::Tensor before_;      // fingerprints of the unsharded parameters, or of the shards on ranks that keep them
  Tensors sharded_grads_;  // per parameter: .grad from before
};

namespace {

void check_can_summon(const std::vector<std::shared_ptr<ShardedModule>>& found, const Module& module,
                      const SummonOptions& options) {
  TESSERA_CHECK(!(options.writeback && options.rank0_only), UsageError, kSummon, "(", class_name(module),
                "): with rank0_only, changes would stay on the first rank only, and ranks would differ; set ",
                "writeback = false");
  TESSERA_CHECK(torch::autograd::get_current_graph_task_id() == -1, UsageError, kSummon, "(", class_name(module),
                ") inside backward, which unshards and reshards parameters itself; call it afterwards");
  for (const auto& sharded : found) {
    TESSERA_CHECK(!sharded->schedule || !sharded->schedule->in_forward(), UsageError, kSummon, "(", class_name(module),
                  ") inside the forward of ", sharded->group().name(),
                  ", which unshards and reshards parameters itself; call it outside");
    TESSERA_CHECK(!options.with_grads || !sharded->group().options().flat_parameter, UsageError, kSummon, "(",
                  class_name(module), "): with_grads, but the gradients of ", sharded->group().name(),
                  " belong to its flat parameter; wrap it with use_orig_params");
    TESSERA_CHECK(!options.with_grads || !sharded->group().gradients().shows_unreduced(), UsageError, kSummon, "(",
                  class_name(module), "): with_grads, but the gradients of ", sharded->group().name(),
                  " are not reduced yet; run a backward with synchronization first");
  }
}

}  // namespace
}  // namespace tessera::data_parallel::fsdp

namespace tessera {

struct SummonFullParams::Groups {
  std::vector<data_parallel::fsdp::SummonedGroup> all;
};

SummonFullParams::SummonFullParams(torch::nn::Module& module, SummonOptions options)
    : groups_(std::make_unique<Groups>()), exceptions_(std::uncaught_exceptions()) {
  auto found = data_parallel::fsdp::find_sharded_modules(module);
  std::erase_if(found, [&](const auto& sharded) {
    return sharded->group().params().empty() || (!options.recurse && sharded->module != &module);
  });
  data_parallel::fsdp::check_can_summon(found, module, options);
  try {
    for (const auto& sharded : found) {
      if (sharded->summoned) continue;  // by an outer SummonFullParams
      groups_->all.emplace_back(sharded, options);
      groups_->all.back().unshard();
    }
  } catch (...) {
    for (auto& group : groups_->all) group.reshard(/*check=*/false);
    throw;
  }
}

void SummonFullParams::close() {
  if (!groups_) return;
  const auto groups = std::move(groups_);
  const bool check = std::uncaught_exceptions() == exceptions_;  // otherwise other ranks may not take part
  std::string error;
  for (auto& group : groups->all) {
    const auto found = group.reshard(check);
    if (error.empty()) error = found;
  }
  TESSERA_CHECK(error.empty(), UsageError, data_parallel::fsdp::kSummon, ": ", error);
}

SummonFullParams::~SummonFullParams() noexcept(false) {
  if (std::uncaught_exceptions() == exceptions_) {
    close();
    return;
  }
  try {
    close();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the first exception has the cause
  }
}

}  // namespace tessera
