#include "tessera/nn/detail/deferred/shard_replay.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <map>
#include <string_view>

namespace tessera::detail::deferred {
namespace {

// How the arguments of an op change when it runs on a local shard.
enum class LocalRule : uint8_t {
  Factory,      // the argument `size` becomes the local size
  Random,       // the argument `runs` selects the elements of the full tensor's random sequence
  Elementwise,  // unchanged
  Select,       // select(dim, index): the index becomes a local index, on the rank that owns it
};

const std::map<std::string_view, LocalRule>& local_rules() {
  static const std::map<std::string_view, LocalRule> rules = {
      {"aten::abs", LocalRule::Elementwise},
      {"aten::abs_", LocalRule::Elementwise},
      {"aten::add.Scalar", LocalRule::Elementwise},
      {"aten::add.Tensor", LocalRule::Elementwise},
      {"aten::add_.Scalar", LocalRule::Elementwise},
      {"aten::add_.Tensor", LocalRule::Elementwise},
      {"aten::alias", LocalRule::Elementwise},
      {"aten::clamp", LocalRule::Elementwise},
      {"aten::clamp_", LocalRule::Elementwise},
      {"aten::clone", LocalRule::Elementwise},
      {"aten::copy_", LocalRule::Elementwise},
      {"aten::detach", LocalRule::Elementwise},
      {"aten::div.Scalar", LocalRule::Elementwise},
      {"aten::div.Tensor", LocalRule::Elementwise},
      {"aten::div_.Scalar", LocalRule::Elementwise},
      {"aten::div_.Tensor", LocalRule::Elementwise},
      {"aten::empty.memory_format", LocalRule::Factory},
      {"aten::empty_like", LocalRule::Elementwise},
      {"aten::fill_.Scalar", LocalRule::Elementwise},
      {"aten::full", LocalRule::Factory},
      {"aten::full_like", LocalRule::Elementwise},
      {"aten::mul.Scalar", LocalRule::Elementwise},
      {"aten::mul.Tensor", LocalRule::Elementwise},
      {"aten::mul_.Scalar", LocalRule::Elementwise},
      {"aten::mul_.Tensor", LocalRule::Elementwise},
      {"aten::neg", LocalRule::Elementwise},
      {"aten::neg_", LocalRule::Elementwise},
      {"aten::ones", LocalRule::Factory},
      {"aten::ones_like", LocalRule::Elementwise},
      {"aten::select.int", LocalRule::Select},
      {"aten::sub.Scalar", LocalRule::Elementwise},
      {"aten::sub.Tensor", LocalRule::Elementwise},
      {"aten::sub_.Scalar", LocalRule::Elementwise},
      {"aten::sub_.Tensor", LocalRule::Elementwise},
      {"aten::to.dtype", LocalRule::Elementwise},
      {"aten::zero_", LocalRule::Elementwise},
      {"aten::zeros", LocalRule::Factory},
      {"aten::zeros_like", LocalRule::Elementwise},
      {"tessera::philox_bernoulli_", LocalRule::Random},
      {"tessera::philox_cauchy_", LocalRule::Random},
      {"tessera::philox_exponential_", LocalRule::Random},
      {"tessera::philox_geometric_", LocalRule::Random},
      {"tessera::philox_integers_", LocalRule::Random},
      {"tessera::philox_log_normal_", LocalRule::Random},
      {"tessera::philox_normal_", LocalRule::Random},
      {"tessera::philox_uniform_", LocalRule::Random},
  };
  return rules;
}

std::optional<LocalRule> rule_of(const RecordedOp& op) {
  const auto found = local_rules().find(toString(op.op.operator_name()));
  return found == local_rules().end() ? std::nullopt : std::optional(found->second);
}

// Unless alpha is 1, a + alpha * b may round once or twice, depending on the compiler.
bool has_scaled_alpha(const RecordedOp& op) {
  const auto& schema = op.op.schema().arguments();
  for (size_t i = 0; i < schema.size(); i++)
    if (schema[i].name() == "alpha" && !op.arguments[i].toScalar().equal(1)) return true;
  return false;
}

size_t argument(const RecordedOp& op, const char* name) {
  const auto index = op.op.schema().argumentIndexWithName(name);
  TESSERA_CHECK(index, InternalError, toString(op.op.operator_name()), " has no argument ", name);
  return *index;
}

// The local index of a global index along `dim`. nullopt: another rank owns it.
std::optional<int64_t> local_index(const TensorSpec& spec, int64_t dim, int64_t index) {
  int64_t before = 0;
  for (const auto& run : spec.local_ranges(dim)) {
    if (index >= run.begin && index < run.end) return before + index - run.begin;
    before += run.end - run.begin;
  }
  return {};
}

}  // namespace

bool can_replay_on_shard(const Tape& tape, const std::vector<Id>& ops, c10::IntArrayRef sizes) {
  const auto has_target_sizes = [&](Id v) {
    return v != kNone && c10::IntArrayRef(tape.value(v).sizes) == sizes && tape.value(v).contiguous;
  };
  for (const Id id : ops) {
    const auto& op = tape.op(id);
    const auto rule = rule_of(op);
    const bool has_large_constant = std::any_of(op.constants.begin(), op.constants.end(),
                                                [](const auto& constant) { return constant.first.numel() != 1; });
    if (!rule || has_large_constant || has_scaled_alpha(op)) return false;
    const bool inputs_fit = std::all_of(op.inputs.begin(), op.inputs.end(),
                                        [&](const auto& input) { return has_target_sizes(input.second); });
    const bool outputs_fit = std::all_of(op.outputs.begin(), op.outputs.end(), has_target_sizes);
    // The output of a select() may only be an operand of an in-place op that has no other tensor operand.
    const bool writes_selected = rule == LocalRule::Elementwise && op.inputs.size() == 1 && op.outputs.size() == 1 &&
                                 op.outputs[0] == op.inputs[0].second;
    if (rule == LocalRule::Select ? !inputs_fit : !(inputs_fit && outputs_fit) && !writes_selected) return false;
  }
  return true;
}

bool localize_arguments(const RecordedOp& op, const TensorSpec& spec, std::vector<c10::IValue>& arguments) {
  for (const auto& v : arguments)
    if (v.isTensor() && !v.toTensor().defined()) return false;  // the output of a select() that another rank owns
  switch (*rule_of(op)) {
    case LocalRule::Factory:
      arguments[argument(op, "size")] = c10::IntArrayRef(spec.local_sizes);
      return true;
    case LocalRule::Random:
      arguments[argument(op, "ranges")] = spec.range_list();
      return true;
    case LocalRule::Elementwise:
      return true;
    case LocalRule::Select: {
      auto dim = arguments[argument(op, "dim")].toInt(), index = arguments[argument(op, "index")].toInt();
      if (dim < 0) dim += static_cast<int64_t>(spec.sizes.size());
      if (index < 0) index += spec.sizes[dim];
      const auto local = local_index(spec, dim, index);
      if (local) arguments[argument(op, "index")] = *local;
      return local.has_value();
    }
  }
  return false;
}

}  // namespace tessera::detail::deferred
