#include "tessera/compile/detail/api/recompile_agreement.h"

#include "tessera/comm/world.h"

#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string_view>
#include <vector>

namespace tessera::compiler {
namespace {

bool has_peers(const comm::Group& group) {
  return group && group->size() > 1 && group->backend_name() != std::string_view("fake");
}

std::string recompile_key(int64_t rank) { return c10::str("compile/recompiles/", rank); }

int64_t global_rank(const comm::Group& group) { return group->ranks()[static_cast<size_t>(group->rank())]; }

}  // namespace

void announce_recompile(const Program& last, const std::string& reason) {
  std::vector<const comm::Group*> groups;
  for (const auto& each : last.groups)
    if (has_peers(each.group)) groups.push_back(&each.group);
  std::vector<c10::intrusive_ptr<c10d::Work>> barriers;
  for (const auto* group : groups)
    if ((*group)->store())
      (*group)->store()->set(recompile_key(global_rank(*group)), std::vector<uint8_t>(reason.begin(), reason.end()));
  try {
    // All are posted before the first wait: peers may wait on any of the groups.
    for (const auto* group : groups) barriers.push_back((*group)->backend()->barrier());
    for (const auto& barrier : barriers) barrier->wait();
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    TESSERA_FAIL(UsageError, "compile: rank ", global_rank(*groups.front()), " recompiles its step, because ", reason,
                 ", and not all of its peers do. Give all ranks the same shapes, modes and numbers, or set "
                 "CompileOptions::agree to Agree::EveryCall. ",
                 known ? known->what_without_backtrace() : error.what());
  }
  for (const auto* group : groups)
    if ((*group)->store()) (*group)->store()->deleteKey(recompile_key(global_rank(*group)));
}

std::string recompiles_of_peers(const Program& program) {
  std::string text;
  for (const auto& each : program.groups) {
    if (!has_peers(each.group) || !each.group->store()) continue;
    for (const auto rank : each.group->ranks()) {
      try {
        if (rank == global_rank(each.group) || !each.group->store()->check({recompile_key(rank)})) continue;
        const auto reason = each.group->store()->get(recompile_key(rank));
        text = c10::str("compile: rank ", rank, " recompiles its step, because ",
                        std::string(reason.begin(), reason.end()), ", and rank ", global_rank(each.group),
                        " (this one) does not. ");
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store may be gone; the first error counts
      }
    }
  }
  return text;
}

bool any_rank(bool wanted) {
  const auto& group = World::current().group();
  if (!has_peers(group)) return wanted;
  auto flag = at::full({1}, wanted ? 1 : 0, at::kInt);
  std::vector<at::Tensor> tensors{flag};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group->backend()->allreduce(tensors, options)->wait();
  return flag.item<int>() != 0;
}

}  // namespace tessera::compiler
