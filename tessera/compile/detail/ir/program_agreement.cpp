#include "tessera/compile/detail/ir/program_agreement.h"

#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/comm/detail/watch/monitored_backend.h"
#include "tessera/comm/detail/watch/store_wait.h"
#include "tessera/comm/world.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/print.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <sstream>
#include <string_view>

namespace tessera::compiler {
namespace {

// One line per collective on the group, in order. These lines must be equal on all ranks of the group. Sizes are left
// out, because local shards may be uneven.
std::vector<std::string> collectives_on(const Program& program, int32_t group) {
  std::vector<std::string> lines;
  for (const auto& node : program.nodes) {
    if (kind_of(node) != OpKind::Collective || group_of(node) != group) continue;
    std::ostringstream line;
    line << node.name();
    node.each_read([&](ValueId id) { line << " " << short_name(program[id].type.dtype); });
    // From one kind of shard of a dim to another, each rank has its own sizes to send and to receive.
    const bool own_sizes = node.name() == "tessera.all_to_all";
    for (const auto& arg : node.args)
      if (const auto* value = std::get_if<c10::IValue>(&arg); value && !(own_sizes && value->isIntList())) {
        line << " ";
        print_arg(line, program, arg);
      }
    if (!node.module.empty()) line << "  # " << node.module;
    lines.push_back(line.str());
  }
  return lines;
}

std::vector<uint8_t> bytes_of_text(const std::string& text) { return {text.begin(), text.end()}; }

std::string failure_key(const CompileAttempt& attempt, int64_t rank) {
  return c10::str("compile/failed/", attempt.function, "/", rank);
}

// The store of the world, where failures are published: a rank that could not trace does not know the groups of its
// program. Null: the program has no peers, or failures are not published.
c10d::Store* store_of_failures(const CompileAttempt& attempt) {
  if (attempt.function.empty() || !World::has_current()) return nullptr;
  const auto world = World::current();
  return has_peers(world.group()) ? world.store().get() : nullptr;
}

// The first rank of `ranks` that could not compile, and why. "": none.
std::string failure_among(const std::vector<int64_t>& ranks, const CompileAttempt& attempt) {
  auto* store = store_of_failures(attempt);
  if (!store) return "";
  for (const auto rank : ranks) {
    if (rank == World::current().rank() || !store->check({failure_key(attempt, rank)})) continue;
    const auto bytes = store->get(failure_key(attempt, rank));
    const std::string text(bytes.begin(), bytes.end());
    const auto end = text.find('\n');
    const auto number = std::stoll(text);
    if (number < 0 || number >= attempt.number)
      return c10::str("compile: rank ", rank, " cannot compile: ", text.substr(end + 1));
  }
  return "";
}

// Waits until all ranks of the group are here with a program of their own. Arrivals are counted in the store of the
// group. A rank that gives up does not count, so the counts of all ranks stay equal.
void wait_for_peers(const comm::Group& group, const CompileAttempt& attempt) {
  if (!group->store()) return;  // require_same_on_all_ranks() says so
  auto& store = *group->store();
  const auto global = [&](int64_t rank) { return group->ranks()[static_cast<size_t>(rank)]; };
  const auto count_key = c10::str("compile/arrivals/", group->rank());
  const auto round = store.add(count_key, 1);
  const auto key = [&](int64_t number, int64_t rank) { return c10::str("compile/arrived/", number, "/", rank); };
  store.set(key(round, group->rank()), bytes_of_text("here"));
  std::string failed;
  const auto stopped = [&] {
    failed = failure_among(group->ranks(), attempt);
    if (!failed.empty()) return failed;
    const auto* monitored = dynamic_cast<const comm::watch::MonitoredBackend*>(group->backend().get());
    return monitored ? monitored->lost() : std::string();
  };
  for (int64_t rank = 0; rank < group->size(); rank++) {
    if (rank == group->rank()) continue;
    try {
      comm::watch::wait_for_key(store, key(round, rank), group->timeout(), stopped);
    } catch (const std::exception&) {
      store.add(count_key, -1);
      store.deleteKey(key(round, group->rank()));
      TESSERA_CHECK(failed.empty(), UsageError, failed);
      const auto why =
          c10::str("rank ", global(group->rank()), " waited ", static_cast<double>(group->timeout().count()) / 1000.0,
                   " s for rank ", global(rank), " of group '", group->name(), "' in compile; it has not responded");
      tessera::detail::note_culprit(global(rank), why);
      TESSERA_FAIL(CommError, why);
    }
  }
  if (round > 1) store.deleteKey(key(round - 1, group->rank()));  // all have read it
}

}  // namespace

bool has_peers(const comm::Group& group) {
  return group && group->size() > 1 && group->backend_name() != std::string_view("fake");
}

bool has_peers(const Program& program) {
  return std::any_of(program.groups.begin(), program.groups.end(),
                     [](const auto& each) { return has_peers(each.group); });
}

// An error of the store is not the error that counts.
void publish_failure(const CompileAttempt& attempt, const std::string& reason, bool runs_eager) {
  try {
    if (auto* store = store_of_failures(attempt))
      store->set(failure_key(attempt, World::current().rank()),
                 bytes_of_text(c10::str(runs_eager ? -1 : attempt.number, "\n", reason)));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

void withdraw_failure(const CompileAttempt& attempt) {
  try {
    if (auto* store = store_of_failures(attempt)) store->deleteKey(failure_key(attempt, World::current().rank()));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

void agree_on(const Program& program, const CompileAttempt& attempt) {
  for (size_t g = 0; g < program.groups.size(); g++) {
    const auto& group = program.groups[g].group;
    if (!has_peers(group)) continue;
    wait_for_peers(group, attempt);
    comm::require_same_on_all_ranks(group, "compile", collectives_on(program, static_cast<int32_t>(g)));
  }
}

}  // namespace tessera::compiler
