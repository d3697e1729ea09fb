#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/rules/detail/rule.h"

#include <map>
#include <optional>
#include <sstream>

// Which dim of each value is the batch, said in the text:
//
//   input %0: f32[16, 10] batch 0 argument "0"
//   %2: f32[16, 5] batch 0 = aten.mm(%0, %1)
//   %3: f32[80] batch 0 in %2 = aten.view(%2, [80])
//   %4: f32[] batch reduced = aten.sum(%3, none)
//
// It starts at arguments, at dim `dim`, and goes on by the rules that distributed tensors have: the batch is a cut, and
// what the rule of an op makes of a cut of its input is where the batch is in its result. A sum over the batch gives
// what a rank would have a term of. Sizes are never compared, so that features as many as the batch are not taken for
// it. Operands without a batch may be cut along: a bias that is added, a mask of the batch's size.
namespace tessera::compiler {
namespace {

using rules::OpQuery;
using rules::Row;

int64_t pieces_for(int64_t batch) {  // that it can be cut into evenly
  for (int64_t n = 2; n * n <= batch; n++)
    if (batch % n == 0) return n;
  return std::max<int64_t>(batch, 2);
}

class BatchDims {
 public:
  BatchDims(Program& program, int64_t dim) : program_(program), dim_(dim), cut_(program.values.size()) {}

  Matched run() {
    for (auto& value : program_.values) value.batch_dim = Value::kNoBatch;
    for (const auto& input : program_.inputs) {
      const auto& sizes = program_[input.value].type.sizes;
      if (input.role != Role::Argument || static_cast<int64_t>(sizes.size()) <= dim_) continue;
      pieces_ = pieces_for(sizes[static_cast<size_t>(dim_)]);
      set(input.value, Shard(dim_));
    }
    for (const auto& node : program_.nodes) follow(node);
    Matched matched;
    for (const auto& value : program_.values) matched.times += value.batch_dim >= 0;
    std::ostringstream note;
    for (const auto& [name, times] : reduced_by_)
      note << (note.tellp() > 0 ? ", " : "reduced by ") << times << " " << name;
    matched.note = note.str();
    return matched;
  }

 private:
  using Cut = std::optional<Placement>;
  const Cut& cut(ValueId id) const { return cut_[static_cast<size_t>(id)]; }

  void set(ValueId id, const Cut& cut) {
    if (id == kNone) return;
    cut_[static_cast<size_t>(id)] = cut;
    if (!cut) return;
    auto& value = program_.values[static_cast<size_t>(id)];
    value.batch_dim = cut->is_sharded() ? cut->dim : Value::kBatchReduced;
  }

  static std::vector<ValueId> results_of(const Node& node) {
    std::vector<ValueId> flat;
    for (const auto& result : node.results) {
      if (const auto* id = std::get_if<ValueId>(&result)) flat.push_back(*id);
      if (const auto* list = std::get_if<ValueList>(&result)) flat.insert(flat.end(), list->begin(), list->end());
    }
    return flat;
  }

  void follow(const Node& node) {
    bool any = false, whole_batch = false;
    node.each_read([&](ValueId id) {
      any |= cut(id).has_value();
      whole_batch |= cut(id) && cut(id)->is_sharded();
    });
    if (!any) return;
    const auto results = results_of(node);
    const auto kind = kind_of(node);
    if (kind == OpKind::Wait || node.name().starts_with("tessera.all_reduce")) {
      // Element by element; a sum over ranks is no term any more.
      const auto* x = std::get_if<ValueId>(&node.args[0]);
      if (x && (kind == OpKind::Wait || cut(*x)->is_sharded()))
        for (const auto id : results) set(id, cut(*x));
      return;
    }
    if (kind == OpKind::Collective) return;
    auto made = by_rule(node, results);
    for (size_t i = 0; i < results.size(); i++) {
      if (results[i] == kNone) continue;
      // A number that was computed from a batch has it no more, whatever the op.
      if (!made[i] && whole_batch && program_[results[i]].type.sizes.empty()) made[i] = Partial();
      set(results[i], made[i]);
      if (whole_batch && made[i] && made[i]->is_partial()) reduced_by_[node.name()]++;
    }
  }

  // For each result what becomes of the batch; none: it has none, or nobody knows.
  std::vector<Cut> by_rule(const Node& node, const std::vector<ValueId>& results) {
    std::vector<Cut> made(results.size());
    const auto* known = rules::registry().find(c10::str(node.op.operator_name()));
    if (!known || known->lists == rules::ListMode::Elementwise) return made;
    std::vector<c10::IValue> args;
    OpQuery query{node.schema(), {}, {}};
    std::vector<Cut> cuts;     // by query.tensors
    std::vector<int> written;  // indices of those
    for (size_t i = 0; i < node.args.size(); i++) read_argument(node, i, args, query, cuts, written);
    query.args = args;
    try {
      const auto rule = known->fn(query);
      if (rule.follow) {
        if (cuts.empty() || !cuts[0]) return made;
        const auto out = rule.follow({*cuts[0]}, {pieces_});
        for (auto& each : made) each = out[0];
      } else if (const auto* row = best_row(rule.rows, cuts)) {
        const bool in_place = node.schema().is_mutable();
        for (size_t i = 0; i < results.size() && i < (in_place ? written.size() : row->out.size()); i++) {
          const auto& at = in_place ? row->in[static_cast<size_t>(written[i])] : row->out[i];
          made[i] = as_cut(at, cuts);
        }
      }
    } catch (const c10::Error&) {  // the rule does not know such arguments
    }
    return made;
  }

  void read_argument(const Node& node, size_t i, std::vector<c10::IValue>& args, OpQuery& query, std::vector<Cut>& cuts,
                     std::vector<int>& written) const {
    const auto add = [&](ValueId id, int element) {
      if (id == kNone) return;
      const auto& type = program_[id].type;
      if (writes_argument(node.op, i)) written.push_back(static_cast<int>(query.tensors.size()));
      query.tensors.push_back({type.sizes, type.strides, type.dtype, static_cast<int>(i), element, true});
      cuts.push_back(cut(id));
    };
    args.emplace_back();
    if (const auto* id = std::get_if<ValueId>(&node.args[i])) {
      add(*id, -1);
    } else if (const auto* list = std::get_if<ValueList>(&node.args[i])) {
      for (size_t k = 0; k < list->size(); k++) add((*list)[k], static_cast<int>(k));
    } else if (std::holds_alternative<Live>(node.args[i])) {
      args.back() = 1.0;
    } else if (const auto* constant = std::get_if<c10::IValue>(&node.args[i])) {
      args.back() = *constant;
      if (constant->isScalar() && node.schema().arguments()[i].type()->kind() == c10::TypeKind::TensorType) {
        query.tensors.push_back(
            {{}, {}, constant->isInt() ? c10::kLong : c10::kDouble, static_cast<int>(i), -1, false});
        cuts.emplace_back();
      }
    }
  }

  // The row whose inputs lie as these do; of several the one that cuts fewest others.
  static const Row* best_row(const std::vector<Row>& rows, const std::vector<Cut>& cuts) {
    const Row* best = nullptr;
    size_t fewest = 0;
    for (const auto& row : rows) {
      bool fits = row.in.size() == cuts.size();
      size_t along = 0;
      for (size_t i = 0; fits && i < cuts.size(); i++) {
        const auto& in = row.in[i];
        if (!cuts[i]) {
          fits = !in.is_partial();
          along += in.is_sharded();
        } else {
          fits = cuts[i]->is_sharded() ? in.is_sharded(cuts[i]->dim) : in == *cuts[i];
        }
      }
      if (!fits || (best && along >= fewest)) continue;
      best = &row;
      fewest = along;
    }
    return best;
  }

  // A row says S(d) for any way of cutting d: the inputs' way.
  static Cut as_cut(const Placement& placement, const std::vector<Cut>& cuts) {
    if (placement.is_replicate()) return {};
    if (!placement.is_sharded()) return placement;
    for (const auto& each : cuts)
      if (each && each->is_sharded()) return each->with_dim(placement.dim);
    return placement;
  }

  Program& program_;
  const int64_t dim_;
  int64_t pieces_ = 2;
  std::vector<Cut> cut_;                       // by value
  std::map<std::string, int64_t> reduced_by_;  // op -> times
};

}  // namespace

Matched batch_dims(Program& program, const PassSettings& settings) {
  const auto dim = settings.at("dim");
  TESSERA_CHECK(dim >= 0, UsageError, "pass batch_dims: dim is ", dim, "; count from the front");
  return BatchDims(program, dim).run();
}

}  // namespace tessera::compiler
