#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/coalesced_collective.h"
#include "tessera/compile/detail/passes/passes.h"

#include <optional>
#include <string>

// Coalescing: consecutive collectives of one kind on a group become one coalesced collective of at most `bytes`.
//
//   %2 = tessera.all_reduce(%0, "sum", @tp)               [%2, %4] = tessera.all_reduce_coalesced([%0, %1], "sum", @tp)
//   %3 in %2 = tessera.wait(%2!, @tp)               ->    %3 in %2 = tessera.wait(%2!, @tp)
//   %4 = tessera.all_reduce(%1, "sum", @tp)               %5 in %4 = tessera.wait(%4!, @tp)
//   %5 in %4 = tessera.wait(%4!, @tp)
//
// Law: a collective may be posted later if the nodes that need its result move behind it. The coalesced one is posted
// at the last member. The order among the collectives of a group stays. Sizes are those of unsharded tensors, so that
// ranks with uneven shards decide alike.
namespace tessera::compiler {
namespace {

constexpr const char* kMergeable[] = {"tessera.all_gather", "tessera.all_reduce", "tessera.reduce_scatter"};

// The op's name in kMergeable; null if the node is another op.
const char* mergeable_op(const Node& node) {
  const auto name = node.name();
  for (const auto* each : kMergeable)
    if (name == each) return each;
  return nullptr;
}
bool is_all_gather(const char* op) { return op == kMergeable[0]; }

ValueId input_of(const Node& node) { return std::get<ValueId>(node.args[0]); }
ValueId result_of(const Node& node) { return std::get<ValueId>(node.results[0]); }
int64_t unsharded_bytes_of(const Program& program, const char* op, const Node& node) {
  return program[is_all_gather(op) ? result_of(node) : input_of(node)].type.bytes();
}

constexpr char kFree = 0, kDelayed = 1, kMember = 2;
struct MergeBucket {
  const char* op = nullptr;          // of kMergeable
  std::vector<size_t> members = {};  // nodes
  int64_t bytes = 0;
  std::vector<char> delayed = {};  // by node: kMember, kDelayed if it depends on a member, or kFree
};

bool fits_in(const MergeBucket& bucket, const Program& program, const Node& node, int64_t max_bytes) {
  const auto* op = mergeable_op(node);
  if (op != bucket.op || bucket.bytes + unsharded_bytes_of(program, op, node) > max_bytes) return false;
  const auto& first = program.nodes[bucket.members[0]];
  const auto& type = program[input_of(node)].type;
  if (type.dtype != program[input_of(first)].type.dtype || !type.is_contiguous()) return false;
  return is_all_gather(op) || same(first.args[first.args.size() - 2], node.args[node.args.size() - 2]);  // reduce op
}

// The first bucket of several collectives on the group, from node `from` on. Moves `from` behind it.
std::optional<MergeBucket> find_bucket(const Program& program, const Dependencies& dependencies, int32_t group,
                                       int64_t max_bytes, size_t& from) {
  MergeBucket bucket;
  for (size_t n = from; n < program.nodes.size(); n++) {
    const auto& node = program.nodes[n];
    const bool collective = kind_of(node) == OpKind::Collective;
    const bool here = collective && group_of(node) == group;
    bool delayed = false;
    if (!bucket.members.empty())
      for (const auto earlier : dependencies.before(n)) {
        const auto is = bucket.delayed[static_cast<size_t>(earlier)];
        delayed |= here ? is == kDelayed : is != kFree;  // collectives of the group follow members in any case
      }
    if (here && !delayed && bucket.op && fits_in(bucket, program, node, max_bytes)) {
      bucket.members.push_back(n);
      bucket.delayed[n] = kMember;
      bucket.bytes += unsharded_bytes_of(program, bucket.op, node);
      from = n + 1;
      continue;
    }
    // Another collective of the group starts a new bucket. So does one on another group that would have to move.
    if (here || (collective && delayed)) {
      if (bucket.members.size() > 1) return bucket;
      bucket = {};
      from = n + 1;
      const auto* op = here ? mergeable_op(node) : nullptr;
      if (op && program[input_of(node)].type.is_contiguous()) {
        bucket = {op, {n}, unsharded_bytes_of(program, op, node), std::vector<char>(program.nodes.size(), kFree)};
        bucket.delayed[n] = kMember;
      }
      continue;
    }
    if (delayed) bucket.delayed[n] = kDelayed;
  }
  if (bucket.members.size() > 1) return bucket;
  return {};
}

void merge_bucket(Program& program, const MergeBucket& bucket) {
  const auto last = bucket.members.back();
  const auto merged = coalesced_collective(program, bucket.members, last);
  std::vector<Node> nodes, later;
  size_t next = 0;
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const bool member = next < bucket.members.size() && bucket.members[next] == n;
    if (member) next++;
    if (n == last) {
      nodes.push_back(merged);
      for (auto& node : later) nodes.push_back(std::move(node));
    } else if (!member) {
      (n < last && bucket.delayed[n] == kDelayed ? later : nodes).push_back(std::move(program.nodes[n]));
    }
  }
  program.nodes = std::move(nodes);
}

}  // namespace

Matched merge_collectives(Program& program, const PassSettings& settings) {
  Matched matched;
  int64_t before = 0;
  for (size_t g = 0; g < program.groups.size(); g++) {
    if (group_size(program, static_cast<int32_t>(g)) == 1) continue;
    size_t from = 0;
    for (;;) {
      const Dependencies dependencies(program);
      const auto count = program.nodes.size();
      const auto bucket = find_bucket(program, dependencies, static_cast<int32_t>(g), settings.at("bytes"), from);
      if (!bucket) break;
      merge_bucket(program, *bucket);
      before += static_cast<int64_t>(bucket->members.size());
      from -= std::min(from, count - program.nodes.size());
      matched.times++;
    }
  }
  matched.note = c10::str(before, " collectives merged into ", matched.times);
  return matched;
}

}  // namespace tessera::compiler
