#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/passes/passes.h"

#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <string>

// Collectives whose result is on this rank already:
//
//   over a group of one                                       what was given
//   all_gather(x), and of the result only x's own piece       x
//   all_gather of this rank's piece of x, x alike everywhere  x
//   all_reduce "max" or "min", broadcast of such an x         x
//   a second all_reduce of the same                           the first's result
//
// x is alike on all ranks of a group if it was made by an all_reduce, all_gather or broadcast over it. What was
// computed from it need not be: numbers in a program may be this rank's own. Whether a piece is this rank's, each rank
// sees for itself: a collective goes only if all ranks would have it go.
namespace tessera::compiler {
namespace {

struct Gather {
  ValueId x, result;
  int64_t dim;
  std::vector<int64_t> sizes;
};
std::optional<Gather> as_gather(const Node& node) {
  if (node.name() != "tessera.all_gather") return {};
  return Gather{std::get<ValueId>(node.args[0]), std::get<ValueId>(node.results[0]),
                std::get<c10::IValue>(node.args[1]).toInt(), std::get<c10::IValue>(node.args[2]).toIntVector()};
}

class Cancelling {
 public:
  explicit Cancelling(Program& program)
      : program_(program), uses_(program), instead_(program.values.size()), bytes_(program.buffer_bytes()) {
    std::iota(instead_.begin(), instead_.end(), 0);
    in_buffer_.resize(static_cast<size_t>(program.buffers));
    for (size_t v = 0; v < program.values.size(); v++)
      if (program.values[v].buffer >= 0)
        in_buffer_[static_cast<size_t>(program.values[v].buffer)].push_back(static_cast<ValueId>(v));
  }

  Matched run() {
    find_what_is_alike();
    std::map<size_t, ValueId> agreed;                // node -> what its result is
    std::vector<Found> own(program_.groups.size());  // the same, as far as this rank sees
    std::vector<int64_t> count(program_.groups.size(), 0);
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto& node = program_.nodes[n];
      if (kind_of(node) != OpKind::Collective) continue;
      const auto group = static_cast<size_t>(group_of(node));
      const auto number = count[group]++;
      if (const auto x = known_result(n, node); x != kNone)
        agreed[n] = x;
      else if (const auto piece = known_to_this_rank(n, node); piece != kNone)
        own[group].push_back({number, n, piece});
    }
    for (size_t g = 0; g < own.size(); g++)
      if (all_agree(program_.groups[g], own[g]))
        for (const auto& each : own[g]) agreed[each.node] = each.x;
    rewrite(agreed);
    return {static_cast<int64_t>(agreed.size())};
  }

 private:
  struct Known {
    int64_t number;  // of the collective, among its group's
    size_t node;
    ValueId x;
  };
  using Found = std::vector<Known>;

  const Type& type(ValueId id) const { return program_[id].type; }
  int32_t writes_to(ValueId id) const { return uses_.writes[static_cast<size_t>(program_.buffer_of(id))]; }

  int64_t rank_in(int32_t group) const {
    const auto& info = program_.groups[static_cast<size_t>(group)];
    return info.group ? info.group->rank() : info.rank;
  }

  void find_what_is_alike() {
    alike_.assign(static_cast<size_t>(program_.buffers), -1);
    for (const auto& node : program_.nodes) {
      const auto name = node.name();
      if (name == "tessera.all_reduce" || name == "tessera.all_gather" || name == "tessera.broadcast")
        node.each_result([&](ValueId id) { alike_[static_cast<size_t>(program_.buffer_of(id))] = group_of(node); });
    }
  }
  bool is_alike(ValueId id, int32_t group) const {
    return alike_[static_cast<size_t>(program_.buffer_of(id))] == group && writes_to(id) == 0;
  }

  // Where along dim this rank's piece begins; none if that is not known.
  std::optional<int64_t> begin_of(const Gather& gather, int32_t group) const {
    const auto rank = rank_in(group);
    if (rank < 0 || static_cast<size_t>(rank) >= gather.sizes.size()) return {};
    return std::accumulate(gather.sizes.begin(), gather.sizes.begin() + rank, int64_t{0});
  }

  // What the result of a collective is, without it; kNone: not known.
  ValueId known_result(size_t n, const Node& node) const {
    const auto* x = std::get_if<ValueId>(&node.args[0]);
    const auto* result = node.results.empty() ? nullptr : std::get_if<ValueId>(&node.results[0]);
    if (!x || !result || node.schema().is_mutable()) return kNone;
    const auto group = group_of(node);
    const bool alone = size_of_group(program_, group) == 1;
    if (alone) return type(*x).sizes == type(*result).sizes ? *x : kNone;
    const auto name = node.name();
    const bool alike = is_alike(*x, group) && is_whole(program_, *x, bytes_);
    if (name == "tessera.broadcast") return alike ? *x : kNone;
    if (name == "tessera.all_reduce") {
      const auto& op = std::get<c10::IValue>(node.args[1]).toStringRef();
      if (alike && (op == "max" || op == "min")) return *x;
      return earlier_reduction(n, node, *x);
    }
    return kNone;
  }
  // The same, where it depends on which piece is this rank's.
  ValueId known_to_this_rank(size_t n, const Node& node) const {
    const auto gather = as_gather(node);
    if (!gather) return kNone;
    return only_own_piece_is_read(*gather, group_of(node)) ? gather->x : cut_from(*gather, group_of(node), n);
  }

  // The waited result of an all_reduce of the same before, if it is still that.
  ValueId earlier_reduction(size_t n, const Node& node, ValueId x) const {
    if (writes_to(x) != 0) return kNone;
    for (const auto reader : uses_.readers[static_cast<size_t>(x)]) {
      if (static_cast<size_t>(reader) >= n) break;
      const auto& other = program_.nodes[static_cast<size_t>(reader)];
      if (other.name() != node.name() || !same(other.args[1], node.args[1]) || !same(other.args[2], node.args[2]))
        continue;
      const auto result = std::get<ValueId>(other.results[0]);
      if (!uses_.is_settled(program_, result)) continue;
      for (const auto wait : uses_.readers[static_cast<size_t>(result)])
        if (static_cast<size_t>(wait) < n && kind_of(program_.nodes[static_cast<size_t>(wait)]) == OpKind::Wait)
          return std::get<ValueId>(program_.nodes[static_cast<size_t>(wait)].results[0]);
    }
    return kNone;
  }

  // Are all readers of the gathered tensor views of x's own piece, in x's own layout?
  bool only_own_piece_is_read(const Gather& gather, int32_t group) const {
    const auto begin = begin_of(gather, group);
    const auto b = static_cast<size_t>(program_.buffer_of(gather.result));
    if (!begin || uses_.seen[b] || uses_.writes[b] != 0 || writes_to(gather.x) != 0) return false;
    const auto offset = *begin * type(gather.result).strides[static_cast<size_t>(gather.dim)];
    bool any = false;
    for (const auto id : in_buffer_[b]) {
      const bool own = program_[id].offset == offset && type(id) == type(gather.x);
      any |= own;
      for (const auto reader : own ? std::vector<int32_t>() : uses_.readers[static_cast<size_t>(id)]) {
        const auto& node = program_.nodes[static_cast<size_t>(reader)];
        if (kind_of(node) != OpKind::Wait && !is_view(program_, node)) return false;
      }
    }
    return any;
  }

  // Is what is gathered this rank's piece of a tensor that is alike everywhere? Then that tensor is the result.
  ValueId cut_from(const Gather& gather, int32_t group, size_t n) const {
    auto piece = gather.x;
    if (const auto* copy = uses_.maker(program_, piece); copy && copy->name() == "aten.clone" && writes_to(piece) == 0)
      piece = std::get<ValueId>(copy->args[0]);
    const auto begin = begin_of(gather, group);
    if (!begin || !is_alike(piece, group)) return kNone;
    for (const auto id : in_buffer_[static_cast<size_t>(program_.buffer_of(piece))]) {
      const auto made_by = uses_.made_by[static_cast<size_t>(id)];
      if (type(id) != type(gather.result) || made_by < 0 || static_cast<size_t>(made_by) > n) continue;
      if (kind_of(program_.nodes[static_cast<size_t>(made_by)]) == OpKind::Collective) continue;  // not waited for
      const auto stride = type(id).strides[static_cast<size_t>(gather.dim)];
      if (program_[piece].offset == program_[id].offset + *begin * stride && type(piece).strides == type(id).strides &&
          type(piece).sizes == type(gather.x).sizes)
        return id;
    }
    return kNone;
  }

  // Asked of every group, found or not: the others ask, too.
  static bool all_agree(const GroupInfo& info, const Found& found) {
    if (!info.group || info.group->size() == 1) return true;
    std::ostringstream line;
    for (const auto& each : found) line << each.number << " ";
    try {
      comm::agree(info.group, "cancel_collectives", {line.str()});
    } catch (const UsageError&) {
      return false;
    }
    return true;
  }

  // Puts x in the place of a result that nobody writes to; else a copy of it.
  void rewrite(const std::map<size_t, ValueId>& agreed) {
    const auto replaced = [&](ValueId id) { return instead_[static_cast<size_t>(id)]; };
    std::set<ValueId> there;  // results that no collective brings any more
    std::vector<Node> kept;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      auto& node = program_.nodes[n];
      if (kind_of(node) == OpKind::Wait && there.count(std::get<ValueId>(node.args[0]))) {
        const auto result = std::get<ValueId>(node.results[0]);
        instead_[static_cast<size_t>(result)] = replaced(std::get<ValueId>(node.args[0]));
        there.insert(result);
        continue;
      }
      const auto gather = agreed.count(n) ? as_gather(node) : std::nullopt;
      node.replace_reads(replaced);
      const auto found = agreed.find(n);
      if (found == agreed.end()) {
        if (is_own_piece(node)) continue;
        kept.push_back(std::move(node));
        continue;
      }
      const auto x = replaced(found->second), result = std::get<ValueId>(node.results[0]);
      there.insert(result);
      if (gather && type(result).sizes != type(x).sizes) {  // only its piece is read
        const auto begin = *begin_of(*gather, group_of(node));
        const auto offset = begin * type(result).strides[static_cast<size_t>(gather->dim)];
        for (const auto id : in_buffer_[static_cast<size_t>(program_.buffer_of(result))])
          (program_[id].offset == offset && type(id) == type(x) ? own_pieces_[id] : not_read_[id]) = x;
      } else if (can_stand_for(x, result)) {
        stand_for(x, result);
      } else {
        kept.push_back({find_op("aten.clone"),
                        {x, c10::IValue(static_cast<int64_t>(c10::MemoryFormat::Contiguous))},
                        {result},
                        node.module});
      }
    }
    for (auto& output : program_.outputs)
      if (output.value != kNone) output.value = replaced(output.value);
    program_.nodes = std::move(kept);
  }

  // A view of a gathered tensor that is not there any more: it is the piece that was given, or nobody reads it.
  bool is_own_piece(const Node& node) {
    bool gone = false;
    node.each_result([&](ValueId id) {
      const auto own = own_pieces_.find(id);
      if (own != own_pieces_.end()) instead_[static_cast<size_t>(id)] = own->second;
      gone |= own != own_pieces_.end() || not_read_.count(id) > 0;
    });
    return gone;
  }

  bool can_stand_for(ValueId x, ValueId result) const {
    const auto b = static_cast<size_t>(program_.buffer_of(result));
    return type(x) == type(result) && type(x).is_contiguous() && writes_to(x) == 0 && uses_.writes[b] == 0 &&
           !uses_.seen[b];
  }
  void stand_for(ValueId x, ValueId result) {
    instead_[static_cast<size_t>(result)] = x;
    const auto from = program_.buffer_of(result), to = program_.buffer_of(x);
    for (const auto id : in_buffer_[static_cast<size_t>(from)]) {
      auto& value = program_.values[static_cast<size_t>(id)];
      value.buffer = to;
      value.offset += program_[x].offset * type(x).itemsize() / value.type.itemsize();
    }
  }

  Program& program_;
  const Uses uses_;
  std::vector<ValueId> instead_;
  std::vector<std::vector<ValueId>> in_buffer_;
  std::vector<int32_t> alike_;  // by buffer: the group over which it was made alike; -1: none
  const std::vector<int64_t> bytes_;
  std::map<ValueId, ValueId> own_pieces_, not_read_;  // of gathers that went
};

}  // namespace

Matched cancel_collectives(Program& program) { return Cancelling(program).run(); }

}  // namespace tessera::compiler
