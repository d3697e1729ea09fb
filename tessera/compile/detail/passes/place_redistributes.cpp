#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/op_variants.h"
#include "tessera/compile/detail/passes/passes.h"

#include <optional>

// Moves collectives to where they send fewer bytes or are needed once. The laws, each from left to right:
//
//   to_bf16(all_gather(x))            = all_gather(to_bf16(x))      half the bytes
//   relu(all_gather(x))               = all_gather(relu(x))         each rank computes only its shard
//   all_gather(to_f32(x))             = to_f32(all_gather(x))       half the bytes
//   all_reduce(a) * 2 + all_reduce(b) = all_reduce(a * 2 + b)       one collective; for sums
//
// Views between the collective and the op stay behind the collective. The last law changes rounding.
namespace tessera::compiler {
namespace {

class PlaceRedistributes {
 public:
  explicit PlaceRedistributes(Program& program)
      : program_(program),
        def_use_(program),
        replaced_(program),
        in_buffer_(values_by_buffer(program)),
        in_rewrite_(program.nodes.size(), 0),
        removed_(program.nodes.size(), 0),
        before_(program.nodes.size()),
        after_(program.nodes.size()) {}

  // Applies rewrites that do not share nodes. Returns their number.
  int64_t run() {
    int64_t times = 0;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto name = program_.nodes[n].name();
      if (in_rewrite_[n]) continue;
      if (name == "tessera.all_gather")
        times += move_op_before_gather(n) || move_cast_behind_gather(n);
      else if (name == "aten.add.Tensor")
        times += merge_sum_of_all_reduces(n);
    }
    if (times > 0) apply();
    return times;
  }

 private:
  static size_t at(int64_t index) { return static_cast<size_t>(index); }
  Node& node(int32_t n) { return program_.nodes[at(n)]; }
  const Type& type(ValueId id) const { return program_[id].type; }
  bool is_internal(ValueId id) const {
    return def_use_.is_immutable(program_, id) && !def_use_.has_output[at(program_.buffer_of(id))];
  }
  int32_t writes_to(ValueId id) const { return def_use_.writes[at(program_.buffer_of(id))]; }

  static std::optional<ValueId> only_tensor(const Node& node) {  // the first argument, if the others are constants
    const auto* x = node.args.empty() ? nullptr : std::get_if<ValueId>(&node.args[0]);
    if (!x || *x == kNone) return {};
    for (size_t i = 1; i < node.args.size(); i++)
      if (!std::holds_alternative<c10::IValue>(node.args[i])) return {};
    return *x;
  }
  static ValueId result(const Node& node) { return std::get<ValueId>(node.results[0]); }

  // The wait that is the only user of a collective's result; -1 if there are other users.
  int32_t only_wait_of(size_t collective) {
    const auto wait = def_use_.only_user(result(program_.nodes[collective]));
    return wait >= 0 && kind_of(node(wait)) == OpKind::Wait ? wait : -1;
  }

  bool move_op_before_gather(size_t gather) {
    const auto wait = only_wait_of(gather);
    if (wait < 0) return false;
    const auto x = std::get<ValueId>(program_.nodes[gather].args[0]), gathered = result(program_.nodes[gather]);
    std::vector<ValueId> carried = {gathered, result(node(wait))};
    std::vector<size_t> nodes = {gather, at(wait)};
    auto next = def_use_.only_user(carried.back());  // skips views
    while (next >= 0 && is_view(program_, node(next)) && node(next).results.size() == 1 &&
           std::holds_alternative<ValueId>(node(next).results[0]) &&
           type(result(node(next))).dtype == type(gathered).dtype) {
      carried.push_back(result(node(next)));
      nodes.push_back(at(next));
      next = def_use_.only_user(carried.back());
    }
    if (next < 0 || in_rewrite_[at(next)]) return false;
    auto& op = node(next);
    const bool cast = op.name() == "aten._to_copy";
    if (!is_pure(op) || op.results.size() != 1 || !(cast || is_pointwise(op.op)) || only_tensor(op) != carried.back())
      return false;
    const auto op_result = result(op);
    if (!is_internal(gathered) || !is_internal(op_result) || program_[op_result].offset != 0) return false;
    if (cast && type(op_result).itemsize() >= type(gathered).itemsize()) return false;
    if (!cast && type(op_result).itemsize() > type(gathered).itemsize()) return false;
    if (type(op_result).sizes != type(carried.back()).sizes ||
        type(op_result).strides != type(carried.back()).strides || type(op_result).device != type(gathered).device)
      return false;

    auto moved = op;
    moved.args[0] = x;
    auto wanted = type(x);
    wanted.dtype = type(op_result).dtype;
    if (!wanted.is_contiguous() || !has_result_type(moved, wanted)) return false;
    const auto shard = program_.add(wanted);
    moved.results = {shard};
    before_[gather].push_back(std::move(moved));
    program_.nodes[gather].args[0] = shard;
    for (const auto id : carried) program_.values[at(id)].type.dtype = wanted.dtype;
    removed_[at(next)] = 1;
    nodes.push_back(at(next));
    replace_by(carried.back(), op_result);
    mark_in_rewrite(nodes);
    return true;
  }

  bool move_cast_behind_gather(size_t gather) {
    const auto wait = only_wait_of(gather);
    const auto x = std::get<ValueId>(program_.nodes[gather].args[0]);
    const auto cast = def_use_.def_node[at(x)];
    if (wait < 0 || cast < 0 || in_rewrite_[at(cast)] || node(cast).name() != "aten._to_copy" || !is_internal(x))
      return false;
    const auto low = only_tensor(node(cast));
    if (!low || type(*low).itemsize() >= type(x).itemsize() || writes_to(*low) != 0) return false;
    if (def_use_.only_user(x) != static_cast<int32_t>(gather) || !type(*low).is_contiguous()) return false;
    const auto gathered = result(node(wait));
    auto low_type = type(gathered);
    low_type.dtype = type(*low).dtype;
    const auto low_gathered = program_.add(low_type);
    const auto waited = program_.add_in(low_gathered, low_type, 0);
    auto new_cast = node(cast);
    new_cast.args[0] = waited;
    new_cast.results = {gathered};
    if (!has_result_type(new_cast, type(gathered))) return false;
    program_.nodes[gather].args[0] = *low;
    program_.nodes[gather].results = {low_gathered};
    node(wait).args[0] = low_gathered;
    node(wait).results = {waited};
    after_[at(wait)].push_back(std::move(new_cast));
    removed_[at(cast)] = 1;
    mark_in_rewrite({gather, at(wait), at(cast)});
    return true;
  }

  // One operand of the sum: all_reduce(x), scaled by a constant if `scale` is set.
  struct Operand {
    ValueId x = kNone;
    int32_t reduce = -1, wait = -1, scale = -1;
  };
  std::optional<Operand> operand_of(ValueId id, int32_t sum) {
    Operand operand;
    const auto* def = def_use_.def(program_, id);
    if (!def || def_use_.only_user(id) != sum) return {};
    operand.wait = def_use_.def_node[at(id)];
    const auto name = def->name();
    if (name == "aten.mul.Tensor" || name == "aten.mul.Scalar" || name == "aten.div.Tensor" ||
        name == "aten.div.Scalar") {
      const auto scaled = only_tensor(*def);
      if (!scaled || !is_internal(id) || !is_internal(*scaled)) return {};
      operand.scale = operand.wait;
      operand.wait = def_use_.def_node[at(*scaled)];
      if (operand.wait < 0 || def_use_.only_user(*scaled) != operand.scale) return {};
    }
    if (in_rewrite_[at(operand.wait)] || kind_of(node(operand.wait)) != OpKind::Wait) return {};
    const auto reduced = std::get<ValueId>(node(operand.wait).args[0]);
    operand.reduce = def_use_.def_node[at(reduced)];
    if (operand.reduce < 0 || node(operand.reduce).name() != "tessera.all_reduce" ||
        def_use_.only_user(reduced) != operand.wait || !is_internal(reduced))
      return {};
    if (std::get<c10::IValue>(node(operand.reduce).args[1]).toStringRef() != "sum") return {};
    operand.x = std::get<ValueId>(node(operand.reduce).args[0]);
    if (writes_to(operand.x) != 0 || in_rewrite_[at(operand.reduce)]) return {};
    return operand;
  }

  bool merge_sum_of_all_reduces(size_t sum) {
    auto& add = program_.nodes[sum];
    const auto *a = std::get_if<ValueId>(&add.args[0]), *b = std::get_if<ValueId>(&add.args[1]);
    const auto* alpha = constant_or_null(add.args[2]);
    const auto op_result = result(add);
    if (!a || !b || *a == *b || !alpha || !alpha->isScalar() || !is_internal(op_result)) return false;
    if (type(*a) != type(op_result) || type(*b) != type(op_result) || !c10::isFloatingType(type(op_result).dtype))
      return false;
    auto first = operand_of(*a, static_cast<int32_t>(sum)), second = operand_of(*b, static_cast<int32_t>(sum));
    if (!first || !second || !same(node(first->reduce).args[2], node(second->reduce).args[2])) return false;
    if (type(first->x) != type(op_result) || type(second->x) != type(op_result)) return false;
    // The merged all-reduce is posted at the later of the two, where both inputs are ready.
    const auto& late = first->reduce > second->reduce ? *first : *second;
    const auto& early = first->reduce > second->reduce ? *second : *first;
    auto& posted = before_[at(late.reduce)];
    const auto scaled = [&](const Operand& operand) {
      if (operand.scale < 0) return operand.x;
      auto scale = node(operand.scale);
      scale.args[0] = operand.x;
      posted.push_back(scale);
      removed_[at(operand.scale)] = 1;
      return result(scale);
    };
    auto local_sum = add;
    local_sum.args[0] = scaled(*first);
    local_sum.args[1] = scaled(*second);
    const auto local = program_.add(type(op_result));
    local_sum.results = {local};
    posted.push_back(std::move(local_sum));
    node(late.reduce).args[0] = local;
    removed_[at(early.reduce)] = removed_[at(early.wait)] = removed_[sum] = 1;
    replace_by(result(node(late.wait)), op_result);
    mark_in_rewrite({sum, at(early.reduce), at(early.wait), at(late.reduce), at(late.wait)});
    return true;
  }

  bool has_result_type(const Node& op, const Type& wanted) const {
    const auto types = result_types(program_, op);
    return types && types->size() == 1 && (*types)[0] == wanted;
  }
  void mark_in_rewrite(const std::vector<size_t>& nodes) {
    for (const auto n : nodes) in_rewrite_[n] = 1;
  }
  // Replaces `old`, which covers its buffer, and its views by `now`.
  void replace_by(ValueId now, ValueId old) {
    replaced_.set(old, now);
    move_views(program_, in_buffer_[at(program_.buffer_of(old))], now);
  }

  void apply() {
    std::vector<Node> nodes;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      for (auto& each : before_[n]) nodes.push_back(std::move(each));
      if (!removed_[n]) nodes.push_back(std::move(program_.nodes[n]));
      for (auto& each : after_[n]) nodes.push_back(std::move(each));
    }
    for (auto& each : nodes) replaced_.rewrite_reads(each);
    replaced_.rewrite_outputs(program_);
    program_.nodes = std::move(nodes);
  }

  Program& program_;
  const DefUse def_use_;
  ReplacedValues replaced_;
  std::vector<std::vector<ValueId>> in_buffer_;
  std::vector<char> in_rewrite_, removed_;  // by node
  std::vector<std::vector<Node>> before_, after_;
};

}  // namespace

Matched place_redistributes(Program& program) {
  Matched matched;
  while (const auto times = PlaceRedistributes(program).run()) matched.times += times;
  return matched;
}

}  // namespace tessera::compiler
