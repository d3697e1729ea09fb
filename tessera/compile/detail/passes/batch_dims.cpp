#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/rules/detail/rule.h"

#include <map>
#include <optional>
#include <sstream>

// Finds the batch dim of each value and annotates the program with it. Does not change nodes.
//
//   input %0: f32[16, 10] batch 0 argument "0"
//   %2: f32[16, 5] batch 0 = aten.mm(%0, %1)
//   %3: f32[80] batch 0 in %2 = aten.view(%2, [80])
//   %4: f32[] batch reduced = aten.sum(%3, none)
//
// Law: the batch dim propagates through an op as a sharded dim does. The pass marks dim `dim` of all arguments as Shard
// and applies the sharding rules of DTensor; the placement of a result tells its batch dim. A sum over the batch is
// Partial: "batch reduced". Sizes are never compared, so a feature dim as long as the batch is not mistaken for it.
// Operands without a batch dim may be treated as sharded too: an added bias, a mask of the batch's size.
namespace tessera::compiler {
namespace {

using rules::OpQuery;

// A number of shards that divides the batch evenly.
int64_t shard_count_for(int64_t batch) {
  for (int64_t n = 2; n * n <= batch; n++)
    if (batch % n == 0) return n;
  return std::max<int64_t>(batch, 2);
}

class BatchDims {
 public:
  BatchDims(Program& program, int64_t dim) : program_(program), dim_(dim), placement_(program.values.size()) {}

  Matched run() {
    for (auto& value : program_.values) value.batch_dim = Value::kNoBatch;
    for (const auto& input : program_.inputs) {
      const auto& sizes = program_[input.value].type.sizes;
      if (input.role != Role::Argument || static_cast<int64_t>(sizes.size()) <= dim_) continue;
      shards_ = shard_count_for(sizes[static_cast<size_t>(dim_)]);
      set(input.value, Shard(dim_));
    }
    for (const auto& node : program_.nodes) propagate(node);
    Matched matched;
    for (const auto& value : program_.values) matched.times += value.batch_dim >= 0;
    std::ostringstream note;
    for (const auto& [name, times] : reduced_by_)
      note << (note.tellp() > 0 ? ", " : "reduced by ") << times << " " << name;
    matched.note = note.str();
    return matched;
  }

 private:
  using BatchPlacement = std::optional<Placement>;  // Shard: of the batch dim; Partial: reduced; none: no batch
  const BatchPlacement& placement(ValueId id) const { return placement_[static_cast<size_t>(id)]; }

  void set(ValueId id, const BatchPlacement& placement) {
    if (id == kNone) return;
    placement_[static_cast<size_t>(id)] = placement;
    if (!placement) return;
    auto& value = program_.values[static_cast<size_t>(id)];
    value.batch_dim = placement->is_sharded() ? placement->dim : Value::kBatchReduced;
  }

  static std::vector<ValueId> results_of(const Node& node) {
    std::vector<ValueId> flat;
    for (const auto& result : node.results) {
      if (const auto* id = std::get_if<ValueId>(&result)) flat.push_back(*id);
      if (const auto* list = std::get_if<ValueList>(&result)) flat.insert(flat.end(), list->begin(), list->end());
    }
    return flat;
  }

  void propagate(const Node& node) {
    bool any = false, has_batch_dim = false;
    node.each_read([&](ValueId id) {
      any |= placement(id).has_value();
      has_batch_dim |= placement(id) && placement(id)->is_sharded();
    });
    if (!any) return;
    const auto results = results_of(node);
    const auto kind = kind_of(node);
    if (kind == OpKind::Wait || node.name().starts_with("tessera.all_reduce")) {
      // Elementwise. After an all-reduce over ranks the value is not Partial.
      const auto* x = std::get_if<ValueId>(&node.args[0]);
      if (x && (kind == OpKind::Wait || placement(*x)->is_sharded()))
        for (const auto id : results) set(id, placement(*x));
      return;
    }
    if (kind == OpKind::Collective) return;
    auto inferred = by_rule(node, results);
    for (size_t i = 0; i < results.size(); i++) {
      if (results[i] == kNone) continue;
      // A scalar that is computed from a batch is reduced over it, whichever op computes it.
      if (!inferred[i] && has_batch_dim && program_[results[i]].type.sizes.empty()) inferred[i] = Partial();
      set(results[i], inferred[i]);
      if (has_batch_dim && inferred[i] && inferred[i]->is_partial()) reduced_by_[node.name()]++;
    }
  }

  // The placement of each result by the op's sharding rule; none: no batch dim, or no rule for it.
  std::vector<BatchPlacement> by_rule(const Node& node, const std::vector<ValueId>& results) {
    std::vector<BatchPlacement> inferred(results.size());
    const auto* known = rules::registry().find(c10::str(node.op.operator_name()));
    if (!known || known->lists == rules::ListMode::Elementwise) return inferred;
    std::vector<c10::IValue> args;
    OpQuery query{node.schema(), {}, {}};
    std::vector<BatchPlacement> placements;  // by query.tensors
    std::vector<int> written;                // indices into query.tensors
    for (size_t i = 0; i < node.args.size(); i++) read_argument(node, i, args, query, placements, written);
    query.args = args;
    try {
      const auto rule = known->fn(query);
      if (rule.follow) {
        if (placements.empty() || !placements[0]) return inferred;
        const auto out = rule.follow({*placements[0]}, {shards_});
        for (auto& each : inferred) each = out[0];
      } else if (const auto* strategy = best_strategy(rule.strategies, placements)) {
        const bool in_place = node.schema().is_mutable();
        for (size_t i = 0; i < results.size() && i < (in_place ? written.size() : strategy->out.size()); i++) {
          const auto& at = in_place ? strategy->in[static_cast<size_t>(written[i])] : strategy->out[i];
          inferred[i] = result_placement(at, placements);
        }
      }
    } catch (const c10::Error&) {  // the rule does not support these arguments
    }
    return inferred;
  }

  void read_argument(const Node& node, size_t i, std::vector<c10::IValue>& args, OpQuery& query,
                     std::vector<BatchPlacement>& placements, std::vector<int>& written) const {
    const auto add = [&](ValueId id, int element) {
      if (id == kNone) return;
      const auto& type = program_[id].type;
      if (writes_argument(node.op, i)) written.push_back(static_cast<int>(query.tensors.size()));
      query.tensors.push_back({type.sizes, type.strides, type.dtype, static_cast<int>(i), element, true});
      placements.push_back(placement(id));
    };
    args.emplace_back();
    if (const auto* id = std::get_if<ValueId>(&node.args[i])) {
      add(*id, -1);
    } else if (const auto* list = std::get_if<ValueList>(&node.args[i])) {
      for (size_t k = 0; k < list->size(); k++) add((*list)[k], static_cast<int>(k));
    } else if (std::holds_alternative<RuntimeScalar>(node.args[i])) {
      args.back() = 1.0;
    } else if (const auto* constant = std::get_if<c10::IValue>(&node.args[i])) {
      args.back() = *constant;
      if (constant->isScalar() && node.schema().arguments()[i].type()->kind() == c10::TypeKind::TensorType) {
        query.tensors.push_back(
            {{}, {}, constant->isInt() ? c10::kLong : c10::kDouble, static_cast<int>(i), -1, false});
        placements.emplace_back();
      }
    }
  }

  // The strategy whose input placements match; of several, the one that shards the fewest operands without a batch.
  static const rules::Strategy* best_strategy(const std::vector<rules::Strategy>& strategies,
                                              const std::vector<BatchPlacement>& placements) {
    const rules::Strategy* best = nullptr;
    size_t fewest = 0;
    for (const auto& strategy : strategies) {
      bool fits = strategy.in.size() == placements.size();
      size_t others = 0;
      for (size_t i = 0; fits && i < placements.size(); i++) {
        const auto& in = strategy.in[i];
        if (!placements[i]) {
          fits = !in.is_partial();
          others += in.is_sharded();
        } else {
          fits = placements[i]->is_sharded() ? in.is_sharded(placements[i]->dim) : in == *placements[i];
        }
      }
      if (!fits || (best && others >= fewest)) continue;
      best = &strategy;
      fewest = others;
    }
    return best;
  }

  // S(d) in a strategy means any kind of sharding of d: the result gets the kind of the inputs.
  static BatchPlacement result_placement(const Placement& placement, const std::vector<BatchPlacement>& placements) {
    if (placement.is_replicate()) return {};
    if (!placement.is_sharded()) return placement;
    for (const auto& each : placements)
      if (each && each->is_sharded()) return each->with_dim(placement.dim);
    return placement;
  }

  Program& program_;
  const int64_t dim_;
  int64_t shards_ = 2;
  std::vector<BatchPlacement> placement_;      // by value
  std::map<std::string, int64_t> reduced_by_;  // op -> number of batch reductions
};

}  // namespace

Matched batch_dims(Program& program, const PassSettings& settings) {
  const auto dim = settings.at("dim");
  TESSERA_CHECK(dim >= 0, UsageError, "pass batch_dims: dim is ", dim, "; write a dim >= 0");
  return BatchDims(program, dim).run();
}

}  // namespace tessera::compiler
