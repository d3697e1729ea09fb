#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <string>

// Removes collectives whose result is already on this rank:
//
//   collective                                                        result
//   any, over a group of one rank                                     its input
//   all_gather(x), if only x's own shard of the result is read        x
//   all_gather of this rank's shard of x, if x is replicated          x
//   all_reduce "max" or "min", or broadcast, of a replicated x        x
//   a second all_reduce of the same x                                 the result of the first
//
// Example:   %1 = all_reduce(%0, "sum"); %2 = wait(%1); %3 = all_reduce(%2, "max"); %4 = wait(%3); use(%4)
//       ->   %1 = all_reduce(%0, "sum"); %2 = wait(%1); use(%2)
//
// x is replicated over a group if an all_reduce, all_gather or broadcast over that group defines it. Values that are
// computed from x may not be replicated: a program may contain constants of this rank. Which shard belongs to this rank
// is known only locally, so a collective is removed only if all ranks agree to remove it.
namespace tessera::compiler {
namespace {

struct AllGatherArgs {
  ValueId x, result;
  int64_t dim;
  std::vector<int64_t> sizes;
};
std::optional<AllGatherArgs> as_all_gather(const Node& node) {
  if (node.name() != "tessera.all_gather") return {};
  return AllGatherArgs{std::get<ValueId>(node.args[0]), std::get<ValueId>(node.results[0]),
                       std::get<c10::IValue>(node.args[1]).toInt(), std::get<c10::IValue>(node.args[2]).toIntVector()};
}

class CancelCollectives {
 public:
  explicit CancelCollectives(Program& program)
      : program_(program),
        def_use_(program),
        replaced_(program),
        in_buffer_(values_by_buffer(program)),
        bytes_(program.buffer_bytes()) {}

  Matched run() {
    find_replicated();
    std::map<size_t, ValueId> agreed;                       // node -> the value that replaces its result
    std::vector<Candidates> local(program_.groups.size());  // by group: the same, but only this rank knows so far
    std::vector<int64_t> count(program_.groups.size(), 0);
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto& node = program_.nodes[n];
      if (kind_of(node) != OpKind::Collective) continue;
      const auto group = static_cast<size_t>(group_of(node));
      const auto number = count[group]++;
      if (const auto x = known_result(n, node); x != kNone)
        agreed[n] = x;
      else if (const auto shard = locally_known_result(n, node); shard != kNone)
        local[group].push_back({number, n, shard});
    }
    for (size_t g = 0; g < local.size(); g++)
      if (all_ranks_agree(program_.groups[g], local[g]))
        for (const auto& each : local[g]) agreed[each.node] = each.x;
    rewrite(agreed);
    return {static_cast<int64_t>(agreed.size())};
  }

 private:
  struct Candidate {
    int64_t number;  // of the collective, among those of its group
    size_t node;
    ValueId x;
  };
  using Candidates = std::vector<Candidate>;

  const Type& type(ValueId id) const { return program_[id].type; }
  int32_t writes_to(ValueId id) const { return def_use_.writes[static_cast<size_t>(program_.buffer_of(id))]; }

  int64_t rank_in(int32_t group) const {
    const auto& info = program_.groups[static_cast<size_t>(group)];
    return info.group ? info.group->rank() : info.rank;
  }

  void find_replicated() {
    replicated_over_.assign(static_cast<size_t>(program_.buffers), -1);
    for (const auto& node : program_.nodes) {
      const auto name = node.name();
      if (name == "tessera.all_reduce" || name == "tessera.all_gather" || name == "tessera.broadcast")
        node.each_result(
            [&](ValueId id) { replicated_over_[static_cast<size_t>(program_.buffer_of(id))] = group_of(node); });
    }
  }
  bool is_replicated(ValueId id, int32_t group) const {
    return replicated_over_[static_cast<size_t>(program_.buffer_of(id))] == group && writes_to(id) == 0;
  }

  // The offset of this rank's shard along the dim; none if it is unknown.
  std::optional<int64_t> begin_of(const AllGatherArgs& gather, int32_t group) const {
    const auto rank = rank_in(group);
    if (rank < 0 || static_cast<size_t>(rank) >= gather.sizes.size()) return {};
    return std::accumulate(gather.sizes.begin(), gather.sizes.begin() + rank, int64_t{0});
  }

  // A value that equals the result of the collective on all ranks; kNone: none is known.
  ValueId known_result(size_t n, const Node& node) const {
    const auto* x = std::get_if<ValueId>(&node.args[0]);
    const auto* result = node.results.empty() ? nullptr : std::get_if<ValueId>(&node.results[0]);
    if (!x || !result || node.schema().is_mutable()) return kNone;
    const auto group = group_of(node);
    const bool alone = group_size(program_, group) == 1;
    if (alone) return type(*x).sizes == type(*result).sizes ? *x : kNone;
    const auto name = node.name();
    const bool replicated = is_replicated(*x, group) && covers_buffer(program_, *x, bytes_);
    if (name == "tessera.broadcast") return replicated ? *x : kNone;
    if (name == "tessera.all_reduce") {
      const auto& op = std::get<c10::IValue>(node.args[1]).toStringRef();
      if (replicated && (op == "max" || op == "min")) return *x;
      return earlier_reduction(n, node, *x);
    }
    return kNone;
  }
  // The same, if it depends on which shard belongs to this rank.
  ValueId locally_known_result(size_t n, const Node& node) const {
    const auto gather = as_all_gather(node);
    if (!gather) return kNone;
    return only_own_shard_is_read(*gather, group_of(node)) ? gather->x : gathered_source(*gather, group_of(node), n);
  }

  // The waited result of an earlier all_reduce of the same value, if nothing writes to it.
  ValueId earlier_reduction(size_t n, const Node& node, ValueId x) const {
    if (writes_to(x) != 0) return kNone;
    for (const auto user : def_use_.users[static_cast<size_t>(x)]) {
      if (static_cast<size_t>(user) >= n) break;
      const auto& other = program_.nodes[static_cast<size_t>(user)];
      if (other.name() != node.name() || !same(other.args[1], node.args[1]) || !same(other.args[2], node.args[2]))
        continue;
      const auto result = std::get<ValueId>(other.results[0]);
      if (!def_use_.is_immutable(program_, result)) continue;
      for (const auto wait : def_use_.users[static_cast<size_t>(result)])
        if (static_cast<size_t>(wait) < n && kind_of(program_.nodes[static_cast<size_t>(wait)]) == OpKind::Wait)
          return std::get<ValueId>(program_.nodes[static_cast<size_t>(wait)].results[0]);
    }
    return kNone;
  }

  // True if all users of the gathered tensor are views of this rank's shard with the type of x.
  bool only_own_shard_is_read(const AllGatherArgs& gather, int32_t group) const {
    const auto begin = begin_of(gather, group);
    const auto b = static_cast<size_t>(program_.buffer_of(gather.result));
    if (!begin || def_use_.has_output[b] || def_use_.writes[b] != 0 || writes_to(gather.x) != 0) return false;
    const auto offset = *begin * type(gather.result).strides[static_cast<size_t>(gather.dim)];
    bool any = false;
    for (const auto id : in_buffer_[b]) {
      const bool own = program_[id].offset == offset && type(id) == type(gather.x);
      any |= own;
      for (const auto user : own ? std::vector<int32_t>() : def_use_.users[static_cast<size_t>(id)]) {
        const auto& node = program_.nodes[static_cast<size_t>(user)];
        if (kind_of(node) != OpKind::Wait && !is_view(program_, node)) return false;
      }
    }
    return any;
  }

  // The replicated tensor of which each rank gathers its own shard; kNone if it is not such a gather.
  ValueId gathered_source(const AllGatherArgs& gather, int32_t group, size_t n) const {
    auto shard = gather.x;
    if (const auto* copy = def_use_.def(program_, shard); copy && copy->name() == "aten.clone" && writes_to(shard) == 0)
      shard = std::get<ValueId>(copy->args[0]);
    const auto begin = begin_of(gather, group);
    if (!begin || !is_replicated(shard, group)) return kNone;
    for (const auto id : in_buffer_[static_cast<size_t>(program_.buffer_of(shard))]) {
      const auto def_node = def_use_.def_node[static_cast<size_t>(id)];
      if (type(id) != type(gather.result) || def_node < 0 || static_cast<size_t>(def_node) > n) continue;
      if (kind_of(program_.nodes[static_cast<size_t>(def_node)]) == OpKind::Collective) continue;  // not waited for
      const auto stride = type(id).strides[static_cast<size_t>(gather.dim)];
      if (program_[shard].offset == program_[id].offset + *begin * stride && type(shard).strides == type(id).strides &&
          type(shard).sizes == type(gather.x).sizes)
        return id;
    }
    return kNone;
  }

  // Communicates. Every rank calls it for every group, also without candidates.
  static bool all_ranks_agree(const GroupInfo& info, const Candidates& candidates) {
    if (!info.group || info.group->size() == 1) return true;
    std::ostringstream line;
    for (const auto& each : candidates) line << each.number << " ";
    try {
      comm::require_same_on_all_ranks(info.group, "cancel_collectives", {line.str()});
    } catch (const UsageError&) {
      return false;
    }
    return true;
  }

  // Replaces each result by its equal value x, or by a copy of x if something writes to one of the two.
  void rewrite(const std::map<size_t, ValueId>& agreed) {
    std::set<ValueId> removed;  // results of removed collectives: their waits are removed too
    std::vector<Node> kept;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      auto& node = program_.nodes[n];
      if (kind_of(node) == OpKind::Wait && removed.count(std::get<ValueId>(node.args[0]))) {
        const auto result = std::get<ValueId>(node.results[0]);
        replaced_.set(result, replaced_(std::get<ValueId>(node.args[0])));
        removed.insert(result);
        continue;
      }
      const auto gather = agreed.count(n) ? as_all_gather(node) : std::nullopt;
      replaced_.rewrite_reads(node);
      const auto found = agreed.find(n);
      if (found == agreed.end()) {
        if (is_view_of_removed(node)) continue;
        kept.push_back(std::move(node));
        continue;
      }
      const auto x = replaced_(found->second), result = std::get<ValueId>(node.results[0]);
      removed.insert(result);
      if (gather && type(result).sizes != type(x).sizes) {  // only its shard is read
        const auto begin = *begin_of(*gather, group_of(node));
        const auto offset = begin * type(result).strides[static_cast<size_t>(gather->dim)];
        for (const auto id : in_buffer_[static_cast<size_t>(program_.buffer_of(result))])
          (program_[id].offset == offset && type(id) == type(x) ? own_shards_[id] : unread_[id]) = x;
      } else if (can_replace(x, result)) {
        replace_by(x, result);
      } else {
        kept.push_back({find_op("aten.clone"),
                        {x, c10::IValue(static_cast<int64_t>(c10::MemoryFormat::Contiguous))},
                        {result},
                        node.module});
      }
    }
    replaced_.rewrite_outputs(program_);
    program_.nodes = std::move(kept);
  }

  // True for a view of a removed all-gather. It is this rank's shard, or nothing reads it.
  bool is_view_of_removed(const Node& node) {
    bool is_removed = false;
    node.each_result([&](ValueId id) {
      const auto own = own_shards_.find(id);
      if (own != own_shards_.end()) replaced_.set(id, own->second);
      is_removed |= own != own_shards_.end() || unread_.count(id) > 0;
    });
    return is_removed;
  }

  bool can_replace(ValueId x, ValueId result) const {
    const auto b = static_cast<size_t>(program_.buffer_of(result));
    return type(x) == type(result) && type(x).is_contiguous() && writes_to(x) == 0 && def_use_.writes[b] == 0 &&
           !def_use_.has_output[b];
  }
  void replace_by(ValueId x, ValueId result) {
    replaced_.set(result, x);
    move_views(program_, in_buffer_[static_cast<size_t>(program_.buffer_of(result))], x);
  }

  Program& program_;
  const DefUse def_use_;
  ReplacedValues replaced_;
  std::vector<std::vector<ValueId>> in_buffer_;
  std::vector<int32_t> replicated_over_;  // by buffer: the group over which it is replicated; -1: none
  const std::vector<int64_t> bytes_;
  std::map<ValueId, ValueId> own_shards_, unread_;  // views of removed all-gathers
};

}  // namespace

Matched cancel_collectives(Program& program) { return CancelCollectives(program).run(); }

}  // namespace tessera::compiler
