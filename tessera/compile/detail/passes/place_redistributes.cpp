#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/passes/op_variants.h"
#include "tessera/compile/detail/passes/passes.h"

#include <numeric>
#include <optional>

// A collective moves to where it carries less, or is not needed twice:
//
//   to_bf16(all_gather(x))              all_gather(to_bf16(x))           half the bytes
//   relu(all_gather(x))                 all_gather(relu(x))              a rank computes its piece, not the whole
//   all_gather(to_f32(x))               to_f32(all_gather(x))            half the bytes
//   all_reduce(a) * 2 + all_reduce(b)   all_reduce(a * 2 + b)            one, for sums
//
// Views between them stay behind the collective. The last line rounds otherwise than the program did.
namespace tessera::compiler {
namespace {

class Placing {
 public:
  explicit Placing(Program& program)
      : program_(program),
        uses_(program),
        instead_(program.values.size()),
        in_buffer_(static_cast<size_t>(program.buffers)),
        taken_(program.nodes.size(), 0),
        gone_(program.nodes.size(), 0),
        before_(program.nodes.size()),
        after_(program.nodes.size()) {
    std::iota(instead_.begin(), instead_.end(), 0);
    for (size_t v = 0; v < program.values.size(); v++)
      if (program.values[v].buffer >= 0)
        in_buffer_[static_cast<size_t>(program.values[v].buffer)].push_back(static_cast<ValueId>(v));
  }

  // Rewrites what does not overlap; says how much.
  int64_t run() {
    int64_t times = 0;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto name = program_.nodes[n].name();
      if (taken_[n]) continue;
      if (name == "tessera.all_gather")
        times += op_goes_before(n) || cast_goes_behind(n);
      else if (name == "aten.add.Tensor")
        times += sums_are_one(n);
    }
    if (times > 0) apply();
    return times;
  }

 private:
  static size_t at(int64_t index) { return static_cast<size_t>(index); }
  Node& node(int32_t n) { return program_.nodes[at(n)]; }
  const Type& type(ValueId id) const { return program_[id].type; }
  bool is_ours(ValueId id) const { return uses_.is_settled(program_, id) && !uses_.seen[at(program_.buffer_of(id))]; }
  int32_t writes_to(ValueId id) const { return uses_.writes[at(program_.buffer_of(id))]; }

  static std::optional<ValueId> only_tensor(const Node& node) {  // its first argument
    const auto* x = node.args.empty() ? nullptr : std::get_if<ValueId>(&node.args[0]);
    if (!x || *x == kNone) return {};
    for (size_t i = 1; i < node.args.size(); i++)
      if (!std::holds_alternative<c10::IValue>(node.args[i])) return {};
    return *x;
  }
  static ValueId result(const Node& node) { return std::get<ValueId>(node.results[0]); }

  // The wait that alone reads what a collective gives.
  int32_t wait_of(size_t collective) {
    const auto wait = uses_.only_reader(result(program_.nodes[collective]));
    return wait >= 0 && kind_of(node(wait)) == OpKind::Wait ? wait : -1;
  }

  bool op_goes_before(size_t gather) {
    const auto wait = wait_of(gather);
    if (wait < 0) return false;
    const auto x = std::get<ValueId>(program_.nodes[gather].args[0]), gathered = result(program_.nodes[gather]);
    std::vector<ValueId> carried = {gathered, result(node(wait))};
    std::vector<size_t> nodes = {gather, at(wait)};
    auto next = uses_.only_reader(carried.back());
    while (next >= 0 && is_view(program_, node(next)) && node(next).results.size() == 1 &&
           std::holds_alternative<ValueId>(node(next).results[0]) &&
           type(result(node(next))).dtype == type(gathered).dtype) {
      carried.push_back(result(node(next)));
      nodes.push_back(at(next));
      next = uses_.only_reader(carried.back());
    }
    if (next < 0 || taken_[at(next)]) return false;
    auto& op = node(next);
    const bool cast = op.name() == "aten._to_copy";
    if (!is_pure(op) || op.results.size() != 1 || !(cast || is_pointwise(op.op)) || only_tensor(op) != carried.back())
      return false;
    const auto made = result(op);
    if (!is_ours(gathered) || !is_ours(made) || program_[made].offset != 0) return false;
    if (cast && type(made).itemsize() >= type(gathered).itemsize()) return false;
    if (!cast && type(made).itemsize() > type(gathered).itemsize()) return false;
    if (type(made).sizes != type(carried.back()).sizes || type(made).strides != type(carried.back()).strides ||
        type(made).device != type(gathered).device)
      return false;

    auto moved = op;
    moved.args[0] = x;
    auto wanted = type(x);
    wanted.dtype = type(made).dtype;
    if (!wanted.is_contiguous() || !gives(moved, wanted)) return false;
    const auto piece = program_.add(wanted);
    moved.results = {piece};
    before_[gather].push_back(std::move(moved));
    program_.nodes[gather].args[0] = piece;
    for (const auto id : carried) program_.values[at(id)].type.dtype = wanted.dtype;
    gone_[at(next)] = 1;
    nodes.push_back(at(next));
    stand_for(carried.back(), made);
    take(nodes);
    return true;
  }

  bool cast_goes_behind(size_t gather) {
    const auto wait = wait_of(gather);
    const auto x = std::get<ValueId>(program_.nodes[gather].args[0]);
    const auto cast = uses_.made_by[at(x)];
    if (wait < 0 || cast < 0 || taken_[at(cast)] || node(cast).name() != "aten._to_copy" || !is_ours(x)) return false;
    const auto low = only_tensor(node(cast));
    if (!low || type(*low).itemsize() >= type(x).itemsize() || writes_to(*low) != 0) return false;
    if (uses_.only_reader(x) != static_cast<int32_t>(gather) || !type(*low).is_contiguous()) return false;
    const auto whole = result(node(wait));
    auto low_whole = type(whole);
    low_whole.dtype = type(*low).dtype;
    const auto arrived = program_.add(low_whole);
    const auto waited = program_.add_in(arrived, low_whole, 0);
    auto behind = node(cast);
    behind.args[0] = waited;
    behind.results = {whole};
    if (!gives(behind, type(whole))) return false;
    program_.nodes[gather].args[0] = *low;
    program_.nodes[gather].results = {arrived};
    node(wait).args[0] = arrived;
    node(wait).results = {waited};
    after_[at(wait)].push_back(std::move(behind));
    gone_[at(cast)] = 1;
    take({gather, at(wait), at(cast)});
    return true;
  }

  // One side of a sum: all_reduce(x), times or divided by a number if there is `scale`.
  struct Side {
    ValueId x = kNone;
    int32_t reduce = -1, wait = -1, scale = -1;
  };
  std::optional<Side> side_of(ValueId id, int32_t sum) {
    Side side;
    const auto* maker = uses_.maker(program_, id);
    if (!maker || uses_.only_reader(id) != sum) return {};
    side.wait = uses_.made_by[at(id)];
    const auto name = maker->name();
    if (name == "aten.mul.Tensor" || name == "aten.mul.Scalar" || name == "aten.div.Tensor" ||
        name == "aten.div.Scalar") {
      const auto scaled = only_tensor(*maker);
      if (!scaled || !is_ours(id) || !is_ours(*scaled)) return {};
      side.scale = side.wait;
      side.wait = uses_.made_by[at(*scaled)];
      if (side.wait < 0 || uses_.only_reader(*scaled) != side.scale) return {};
    }
    if (taken_[at(side.wait)] || kind_of(node(side.wait)) != OpKind::Wait) return {};
    const auto reduced = std::get<ValueId>(node(side.wait).args[0]);
    side.reduce = uses_.made_by[at(reduced)];
    if (side.reduce < 0 || node(side.reduce).name() != "tessera.all_reduce" ||
        uses_.only_reader(reduced) != side.wait || !is_ours(reduced))
      return {};
    if (std::get<c10::IValue>(node(side.reduce).args[1]).toStringRef() != "sum") return {};
    side.x = std::get<ValueId>(node(side.reduce).args[0]);
    if (writes_to(side.x) != 0 || taken_[at(side.reduce)]) return {};
    return side;
  }

  bool sums_are_one(size_t sum) {
    auto& add = program_.nodes[sum];
    const auto *a = std::get_if<ValueId>(&add.args[0]), *b = std::get_if<ValueId>(&add.args[1]);
    const auto* alpha = constant_in(add.args[2]);
    const auto made = result(add);
    if (!a || !b || *a == *b || !alpha || !alpha->isScalar() || !is_ours(made)) return false;
    if (type(*a) != type(made) || type(*b) != type(made) || !c10::isFloatingType(type(made).dtype)) return false;
    auto first = side_of(*a, static_cast<int32_t>(sum)), second = side_of(*b, static_cast<int32_t>(sum));
    if (!first || !second || !same(node(first->reduce).args[2], node(second->reduce).args[2])) return false;
    if (type(first->x) != type(made) || type(second->x) != type(made)) return false;
    // Where the later of the two was posted, all that it needs is there.
    const auto& late = first->reduce > second->reduce ? *first : *second;
    const auto& early = first->reduce > second->reduce ? *second : *first;
    auto& posted = before_[at(late.reduce)];
    const auto scaled = [&](const Side& side) {
      if (side.scale < 0) return side.x;
      auto scale = node(side.scale);
      scale.args[0] = side.x;
      posted.push_back(scale);
      gone_[at(side.scale)] = 1;
      return result(scale);
    };
    auto together = add;
    together.args[0] = scaled(*first);
    together.args[1] = scaled(*second);
    const auto local = program_.add(type(made));
    together.results = {local};
    posted.push_back(std::move(together));
    node(late.reduce).args[0] = local;
    gone_[at(early.reduce)] = gone_[at(early.wait)] = gone_[sum] = 1;
    stand_for(result(node(late.wait)), made);
    take({sum, at(early.reduce), at(early.wait), at(late.reduce), at(late.wait)});
    return true;
  }

  bool gives(const Node& op, const Type& wanted) const {
    const auto types = result_types(program_, op);
    return types && types->size() == 1 && (*types)[0] == wanted;
  }
  void take(const std::vector<size_t>& nodes) {
    for (const auto n : nodes) taken_[n] = 1;
  }
  // `now` is what `old` was, a whole buffer; so are views of it.
  void stand_for(ValueId now, ValueId old) {
    instead_[at(old)] = now;
    const auto from = at(program_.buffer_of(old));
    for (const auto id : in_buffer_[from]) {
      auto& value = program_.values[at(id)];
      value.buffer = program_.buffer_of(now);
      value.offset += program_[now].offset * type(now).itemsize() / value.type.itemsize();
    }
  }

  void apply() {
    const auto replaced = [&](ValueId id) { return at(id) < instead_.size() ? instead_[at(id)] : id; };
    std::vector<Node> nodes;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      for (auto& each : before_[n]) nodes.push_back(std::move(each));
      if (!gone_[n]) nodes.push_back(std::move(program_.nodes[n]));
      for (auto& each : after_[n]) nodes.push_back(std::move(each));
    }
    for (auto& each : nodes) each.replace_reads(replaced);
    for (auto& output : program_.outputs)
      if (output.value != kNone) output.value = replaced(output.value);
    program_.nodes = std::move(nodes);
  }

  Program& program_;
  const Uses uses_;
  std::vector<ValueId> instead_;
  std::vector<std::vector<ValueId>> in_buffer_;
  std::vector<char> taken_, gone_;  // by node
  std::vector<std::vector<Node>> before_, after_;
};

}  // namespace

Matched place_redistributes(Program& program) {
  Matched matched;
  while (const auto times = Placing(program).run()) matched.times += times;
  return matched;
}

}  // namespace tessera::compiler
