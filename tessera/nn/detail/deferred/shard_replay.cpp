#include "tessera/nn/detail/deferred/shard_replay.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <map>
#include <string_view>

namespace tessera::detail::deferred {
namespace {

enum class How : uint8_t {
  Factory,      // its argument `size` becomes the piece's
  Draw,         // its last arguments say which numbers of the whole a piece gets
  Elementwise,  // as it stands
  Row,          // select: the index becomes one of the piece's, on the rank that has it
};

const std::map<std::string_view, How>& table() {
  static const std::map<std::string_view, How> rows = {
      {"aten::abs", How::Elementwise},
      {"aten::abs_", How::Elementwise},
      {"aten::add.Scalar", How::Elementwise},
      {"aten::add.Tensor", How::Elementwise},
      {"aten::add_.Scalar", How::Elementwise},
      {"aten::add_.Tensor", How::Elementwise},
      {"aten::alias", How::Elementwise},
      {"aten::clamp", How::Elementwise},
      {"aten::clamp_", How::Elementwise},
      {"aten::clone", How::Elementwise},
      {"aten::copy_", How::Elementwise},
      {"aten::detach", How::Elementwise},
      {"aten::div.Scalar", How::Elementwise},
      {"aten::div.Tensor", How::Elementwise},
      {"aten::div_.Scalar", How::Elementwise},
      {"aten::div_.Tensor", How::Elementwise},
      {"aten::empty.memory_format", How::Factory},
      {"aten::empty_like", How::Elementwise},
      {"aten::fill_.Scalar", How::Elementwise},
      {"aten::full", How::Factory},
      {"aten::full_like", How::Elementwise},
      {"aten::mul.Scalar", How::Elementwise},
      {"aten::mul.Tensor", How::Elementwise},
      {"aten::mul_.Scalar", How::Elementwise},
      {"aten::mul_.Tensor", How::Elementwise},
      {"aten::neg", How::Elementwise},
      {"aten::neg_", How::Elementwise},
      {"aten::ones", How::Factory},
      {"aten::ones_like", How::Elementwise},
      {"aten::select.int", How::Row},
      {"aten::sub.Scalar", How::Elementwise},
      {"aten::sub.Tensor", How::Elementwise},
      {"aten::sub_.Scalar", How::Elementwise},
      {"aten::sub_.Tensor", How::Elementwise},
      {"aten::to.dtype", How::Elementwise},
      {"aten::zero_", How::Elementwise},
      {"aten::zeros", How::Factory},
      {"aten::zeros_like", How::Elementwise},
      {"tessera::philox_bernoulli_", How::Draw},
      {"tessera::philox_cauchy_", How::Draw},
      {"tessera::philox_exponential_", How::Draw},
      {"tessera::philox_geometric_", How::Draw},
      {"tessera::philox_integers_", How::Draw},
      {"tessera::philox_log_normal_", How::Draw},
      {"tessera::philox_normal_", How::Draw},
      {"tessera::philox_uniform_", How::Draw},
  };
  return rows;
}

std::optional<How> how(const Step& step) {
  const auto found = table().find(toString(step.op.operator_name()));
  return found == table().end() ? std::nullopt : std::optional(found->second);
}

// a + alpha * b rounds once or twice, as the compiler liked it, unless alpha is 1.
bool has_alpha(const Step& step) {
  const auto& schema = step.op.schema().arguments();
  for (size_t i = 0; i < schema.size(); i++)
    if (schema[i].name() == "alpha" && !step.arguments[i].toScalar().equal(1)) return true;
  return false;
}

size_t argument(const Step& step, const char* name) {
  const auto place = step.op.schema().argumentIndexWithName(name);
  TESSERA_CHECK(place, InternalError, toString(step.op.operator_name()), " has no argument ", name);
  return *place;
}

// The place among this rank's indices of a dim; none: another rank has it.
std::optional<int64_t> local_index(const TensorSpec& spec, int64_t dim, int64_t index) {
  int64_t before = 0;
  for (const auto& run : spec.runs(dim)) {
    if (index >= run.begin && index < run.end) return before + index - run.begin;
    before += run.end - run.begin;
  }
  return {};
}

}  // namespace

bool can_replay_on_shard(const Tape& tape, const std::vector<Id>& steps, c10::IntArrayRef sizes) {
  const auto is_piece = [&](Id v) {
    return v != kNone && c10::IntArrayRef(tape.value(v).sizes) == sizes && tape.value(v).contiguous;
  };
  for (const Id s : steps) {
    const auto& step = tape.step(s);
    const auto row = how(step);
    const bool has_large_constant = std::any_of(step.constants.begin(), step.constants.end(),
                                                [](const auto& constant) { return constant.first.numel() != 1; });
    if (!row || has_large_constant || has_alpha(step)) return false;
    const bool takes_pieces =
        std::all_of(step.inputs.begin(), step.inputs.end(), [&](const auto& input) { return is_piece(input.second); });
    const bool gives_pieces = std::all_of(step.outputs.begin(), step.outputs.end(), is_piece);
    // A row of a piece: only written to, by itself.
    const bool writes_row = row == How::Elementwise && step.inputs.size() == 1 && step.outputs.size() == 1 &&
                            step.outputs[0] == step.inputs[0].second;
    if (row == How::Row ? !takes_pieces : !(takes_pieces && gives_pieces) && !writes_row) return false;
  }
  return true;
}

bool localize_arguments(const Step& step, const TensorSpec& spec, std::vector<c10::IValue>& arguments) {
  for (const auto& v : arguments)
    if (v.isTensor() && !v.toTensor().defined()) return false;  // a row that is not here
  switch (*how(step)) {
    case How::Factory:
      arguments[argument(step, "size")] = c10::IntArrayRef(spec.local_sizes);
      return true;
    case How::Draw:
      arguments[argument(step, "runs")] = spec.run_list();
      return true;
    case How::Elementwise:
      return true;
    case How::Row: {
      auto dim = arguments[argument(step, "dim")].toInt(), index = arguments[argument(step, "index")].toInt();
      if (dim < 0) dim += static_cast<int64_t>(spec.sizes.size());
      if (index < 0) index += spec.sizes[dim];
      const auto here = local_index(spec, dim, index);
      if (here) arguments[argument(step, "index")] = *here;
      return here.has_value();
    }
  }
  return false;
}

}  // namespace tessera::detail::deferred
