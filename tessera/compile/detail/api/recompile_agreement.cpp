#include "tessera/compile/detail/api/recompile_agreement.h"

#include "tessera/base/error.h"
#include "tessera/comm/world.h"
#include "tessera/compile/detail/ir/program_agreement.h"

#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <map>
#include <string_view>
#include <vector>

namespace tessera::compiler {
namespace {

std::string announcement_key(int64_t rank) { return c10::str("compile/announcement/", rank); }

const char* text_of_announcement(Announcement announcement) {
  return announcement == Announcement::Recompiles ? " recompiles its step, because " : " stops its step, because ";
}

int64_t global_rank(const comm::Group& group) { return group->ranks()[static_cast<size_t>(group->rank())]; }

}  // namespace

void announce(Announcement announcement, const Program& last, const std::string& reason) {
  std::vector<const comm::Group*> groups;
  for (const auto& each : last.groups)
    if (has_peers(each.group)) groups.push_back(&each.group);
  std::vector<c10::intrusive_ptr<c10d::Work>> barriers;
  const auto text = text_of_announcement(announcement) + reason;
  for (const auto* group : groups)
    if ((*group)->store())
      (*group)->store()->set(announcement_key(global_rank(*group)), std::vector<uint8_t>(text.begin(), text.end()));
  try {
    // All are posted before the first wait: peers may wait on any of the groups.
    for (const auto* group : groups) barriers.push_back((*group)->backend()->barrier());
    for (const auto& barrier : barriers) barrier->wait();
  } catch (const std::exception& error) {
    TESSERA_FAIL(UsageError, "compile: rank ", global_rank(*groups.front()), text, ", and not all of its peers do. ",
                 announcement == Announcement::Recompiles
                     ? "Give all ranks the same shapes, modes and numbers, or set CompileOptions::agree to "
                       "Agree::EveryCall. "
                     : "",
                 message_of(error));
  }
  for (const auto* group : groups)
    if ((*group)->store()) (*group)->store()->deleteKey(announcement_key(global_rank(*group)));
}

std::string announcements_of_peers(const Program& program) {
  std::string text;
  for (const auto& each : program.groups) {
    if (!has_peers(each.group) || !each.group->store()) continue;
    for (const auto rank : each.group->ranks()) {
      try {
        if (rank == global_rank(each.group) || !each.group->store()->check({announcement_key(rank)})) continue;
        const auto reason = each.group->store()->get(announcement_key(rank));
        text = c10::str("compile: rank ", rank, std::string(reason.begin(), reason.end()), ", and rank ",
                        global_rank(each.group), " (this one) does not. ");
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store may be gone; the first error counts
      }
    }
  }
  return text;
}

int64_t largest_of_ranks(int64_t value) {
  const auto& group = World::current().group();
  if (!has_peers(group)) return value;
  std::vector<at::Tensor> tensors{at::full({1}, value, at::kLong)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group->backend()->allreduce(tensors, options)->wait();
  return tensors[0].item<int64_t>();
}

std::string function_key(const char* type) {
  thread_local std::map<std::string, int64_t> created;
  return c10::str(std::hash<std::string_view>()(type), ".", created[type]++);
}

std::string message_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known ? known->what_without_backtrace() : error.what();
}

bool is_communication_error(const std::exception& error) {
  return dynamic_cast<const CommError*>(&error) || dynamic_cast<const c10::DistError*>(&error);
}

}  // namespace tessera::compiler
