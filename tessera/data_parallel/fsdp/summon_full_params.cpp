#include "tessera/data_parallel/fsdp/summon_full_params.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/state/detail/fit_value.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <exception>

namespace tessera {

using namespace data_parallel;
using namespace data_parallel::fsdp;

namespace {

constexpr const char* kWhat = "summon_full_params";

// ---- who changed what

// Of the bits: NaNs count, and so does the order.
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

// Of each member, each rank's part of the whole value that this rank sees.
at::Tensor fingerprints_of_parts(const Unit& unit) {
  const auto& members = unit.members();
  auto table = at::empty({static_cast<int64_t>(members.size()), unit.shards()->size()}, at::kLong);
  auto cells = table.accessor<int64_t, 2>();
  for (size_t i = 0; i < members.size(); i++)
    for (int64_t r = 0; r < table.size(1); r++)
      cells[static_cast<int64_t>(i)][r] = fingerprint(unit.layout().cut(i, local_value(members[i].handle).detach(), r));
  return table;
}

// Of each member, the piece that this rank keeps.
at::Tensor fingerprints_of_pieces(const Unit& unit) {
  auto table = at::empty({static_cast<int64_t>(unit.members().size())}, at::kLong);
  for (int64_t i = 0; i < table.size(0); i++) {
    const auto place = unit.layout().in_shard(static_cast<size_t>(i), unit.shards()->rank());
    table.accessor<int64_t, 1>()[i] = fingerprint(unit.flat().detach().narrow(0, place.begin, place.size));
  }
  return table;
}

at::Tensor from_all_ranks(const Unit& unit, const at::Tensor& table, const comm::Group& group) {
  const auto own = table.to(unit.device());
  auto sizes = table.sizes().vec();
  sizes.insert(sizes.begin(), group->size());
  auto all = at::empty(sizes, own.options());
  comm::all_gather_into_(all, own, group);
  funcol::wait(all, group);
  return all.cpu();
}

// "" or what was lost: a part that a rank changed, and its owner not, or not likewise. The same on all ranks.
std::string lost_changes(const Unit& unit, const at::Tensor& before, const at::Tensor& after) {
  const auto& members = unit.members();
  const auto was = before.accessor<int64_t, 2>();
  if (const auto& group = unit.shards(); group->size() > 1) {
    const auto all = from_all_ranks(unit, after, group);
    const auto now = all.accessor<int64_t, 3>();
    for (int64_t i = 0; i < all.size(1); i++)
      for (int64_t r = 0; r < group->size(); r++)
        for (int64_t owner = 0; owner < group->size(); owner++)
          if (now[r][i][owner] != was[i][owner] && now[r][i][owner] != now[owner][i][owner]) {
            const auto& name = members[static_cast<size_t>(i)].name;
            return c10::str("rank ", group->ranks()[static_cast<size_t>(r)], " changed ",
                            unit.layout().in_parameter(static_cast<size_t>(i), owner), " of parameter ", name,
                            ", which rank ", group->ranks()[static_cast<size_t>(owner)],
                            " owns and did not change likewise: that change is lost. Make the same change on all "
                            "ranks, or let each rank change its own part");
          }
  }
  if (const auto& group = unit.replicas(); group && group->size() > 1) {
    const auto all = from_all_ranks(unit, after.select(1, unit.shards()->rank()).contiguous(), group);
    const auto now = all.accessor<int64_t, 2>();
    for (int64_t i = 0; i < all.size(1); i++)
      for (int64_t r = 1; r < group->size(); r++)
        if (now[r][i] != now[0][i])
          return c10::str("ranks ", group->ranks()[0], " and ", group->ranks()[static_cast<size_t>(r)],
                          " hold the same part of parameter ", members[static_cast<size_t>(i)].name,
                          " and changed it differently: they are no copies of each other any more. Make the same "
                          "change on all ranks");
  }
  return "";
}

// "" or what a rank wrote to its pieces while only the first rank had whole parameters. The same on all ranks.
std::string writes_beside_the_first(const Unit& unit, const at::Tensor& before) {
  auto changed = fingerprints_of_pieces(unit).ne(before).to(at::kLong);
  std::vector<comm::Group> groups{unit.shards()};
  if (unit.replicas()) groups.push_back(unit.replicas());
  for (const auto& group : groups) {
    if (group->size() == 1) continue;
    const auto all = from_all_ranks(unit, changed, group);
    const auto cells = all.accessor<int64_t, 2>();
    for (int64_t r = 0; r < all.size(0); r++)
      for (int64_t i = 0; i < all.size(1); i++)
        if (cells[r][i])
          return c10::str("rank ", group->ranks()[static_cast<size_t>(r)], " wrote to its piece of parameter ",
                          unit.members()[static_cast<size_t>(i)].name,
                          " with rank0_only, where only the first rank has whole parameters, and nobody's changes are "
                          "meant to stay; leave rank0_only off and set writeback");
  }
  return "";
}

// ---- one unit

bool is_first(const Unit& unit) {
  return unit.shards()->rank() == 0 && (!unit.replicas() || unit.replicas()->rank() == 0);
}

class OpenUnit {
 public:
  OpenUnit(std::shared_ptr<ShardedModule> sharded, const SummonOptions& options)
      : sharded_(std::move(sharded)), options_(options), whole_here_(!options.rank0_only || is_first(unit())) {}

  void open() {
    const at::NoGradGuard no_grad;
    if (unit().options().param_dtype) unit().close();  // what forward left is of another dtype
    sharded_->summoned = true;
    unit().set_full_precision(true);
    if (!whole_here_) before_ = fingerprints_of_pieces(unit());
    unit().open();
    const auto gradients = options_.with_grads ? whole_gradients() : Tensors(unit().members().size());
    if (!whole_here_) return unit().close();
    if (options_.writeback) before_ = fingerprints_of_parts(unit());
    for (size_t i = 0; i < unit().members().size(); i++) {
      auto& handle = const_cast<at::Tensor&>(unit().members()[i].handle);  // NOLINT: a handle
      gradients_.push_back(std::exchange(handle.mutable_grad(), {}));
      if (options_.offload_to_cpu && !unit().device().is_cpu())
        handle.set_data(as_whole(unit().members()[i], local_value(handle).detach().cpu()));
      if (gradients[i].defined()) handle.mutable_grad() = gradients[i].to(local_value(handle).device());
    }
    if (sharded_->registration) sharded_->registration->show_originals();
  }

  // Gives "" or what is wrong with changes that were made, where all ranks can be asked.
  std::string close(bool ask) {
    const at::NoGradGuard no_grad;
    if (!sharded_->summoned) return "";
    std::string wrong;
    if (whole_here_) {
      const auto after = ask && options_.writeback ? fingerprints_of_parts(unit()) : at::Tensor();
      if (options_.writeback) keep_gradients();
      unit().settle_writes(options_.writeback);
      unit().close();
      for (size_t i = 0; i < gradients_.size(); i++) unit().members()[i].handle.mutable_grad() = gradients_[i];
      if (sharded_->registration) sharded_->registration->show_flat();
      if (after.defined()) wrong = lost_changes(unit(), before_, after);
    }
    unit().set_full_precision(false);
    sharded_->summoned = false;
    if (ask && options_.rank0_only)
      wrong = writes_beside_the_first(unit(), whole_here_ ? fingerprints_of_pieces(unit()) : before_);
    return wrong;
  }

 private:
  Unit& unit() const { return *sharded_->turn->unit; }

  // Requires: the unit is open. Not shown yet.
  Tensors whole_gradients() const {
    const auto& members = unit().members();
    Tensors pieces, whole(members.size());
    for (const auto& member : members) pieces.push_back(member.handle.grad());
    if (!unit().layout().is_flat()) {
      for (size_t i = 0; i < members.size(); i++)
        if (pieces[i].defined()) whole[i] = tessera::detail::fit_value(pieces[i], members[i].handle);
      return whole;
    }
    // A rank that has no part of a parameter has no gradient for it, but others may: all agree on which there are.
    auto there = at::zeros({static_cast<int64_t>(members.size())}, at::kLong);
    for (size_t i = 0; i < members.size(); i++)
      there.accessor<int64_t, 1>()[static_cast<int64_t>(i)] = pieces[i].defined();
    there = largest_of_all_ranks(unit(), there);
    const auto gathered = gather_shard(unit(), shard_of_pieces(unit(), pieces, unit().flat().scalar_type()));
    for (size_t i = 0; i < members.size(); i++)
      if (there[static_cast<int64_t>(i)].item<int64_t>())
        whole[i] = as_whole(members[i], whole_in(unit(), i, gathered).clone());
    return whole;
  }

  // This rank's part of gradients that were changed.
  void keep_gradients() {
    const auto rank = unit().shards()->rank();
    for (size_t i = 0; i < gradients_.size(); i++) {
      const auto& whole = unit().members()[i].handle.grad();
      if (!options_.with_grads || !whole.defined() || !gradients_[i].defined()) continue;
      const auto piece = unit().layout().cut(i, local_value(whole), rank);
      local_value(gradients_[i]).copy_(piece.view(local_value(gradients_[i]).sizes()));
    }
  }

  std::shared_ptr<ShardedModule> sharded_;
  SummonOptions options_;
  bool whole_here_;
  at::Tensor before_;  // fingerprints: of parts where parameters are whole, else of pieces
  Tensors gradients_;  // by member, as they were
};

void check(const std::vector<std::shared_ptr<ShardedModule>>& found, const torch::nn::Module& module,
           const SummonOptions& options) {
  TESSERA_CHECK(!(options.writeback && options.rank0_only), UsageError, kWhat, "(", class_name(module),
                "): with rank0_only, changes would stay on the first rank alone, and ranks would differ; set ",
                "writeback = false");
  TESSERA_CHECK(torch::autograd::get_current_graph_task_id() == -1, UsageError, kWhat, "(", class_name(module),
                ") inside of backward, which has parameters come and go; call it afterwards");
  for (const auto& sharded : found) {
    TESSERA_CHECK(!sharded->schedule || !sharded->schedule->in_forward(), UsageError, kWhat, "(", class_name(module),
                  ") inside of the forward of ", sharded->turn->unit->name(),
                  ", which has parameters come and go; call it outside");
    TESSERA_CHECK(!options.with_grads || !sharded->turn->unit->options().flat_parameter, UsageError, kWhat, "(",
                  class_name(module), "): with_grads, but the gradients of ", sharded->turn->unit->name(),
                  " belong to its flat parameter; wrap it with use_orig_params");
  }
}

}  // namespace

struct SummonFullParams::Opened {
  std::vector<OpenUnit> units;
};

SummonFullParams::SummonFullParams(torch::nn::Module& module, SummonOptions options)
    : opened_(std::make_unique<Opened>()), exceptions_(std::uncaught_exceptions()) {
  auto found = find_all(module);
  std::erase_if(found, [&](const auto& sharded) {
    return sharded->turn->unit->members().empty() || (!options.recurse && sharded->module != &module);
  });
  check(found, module, options);
  try {
    for (const auto& sharded : found) {
      if (sharded->summoned) continue;  // by one around this
      opened_->units.emplace_back(sharded, options);
      opened_->units.back().open();
    }
  } catch (...) {
    for (auto& unit : opened_->units) unit.close(false);
    throw;
  }
}

void SummonFullParams::close() {
  if (!opened_) return;
  const auto opened = std::move(opened_);
  const bool ask = std::uncaught_exceptions() == exceptions_;  // else others may be elsewhere
  std::string wrong;
  for (auto& unit : opened->units) {
    const auto found = unit.close(ask);
    if (wrong.empty()) wrong = found;
  }
  TESSERA_CHECK(wrong.empty(), UsageError, kWhat, ": ", wrong);
}

SummonFullParams::~SummonFullParams() noexcept(false) {
  if (std::uncaught_exceptions() == exceptions_) {
    close();
    return;
  }
  try {
    close();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the one under way says more
  }
}

}  // namespace tessera
