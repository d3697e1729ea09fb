#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"
#include "tessera/cli/rules_report.h"
#include "tessera/comm/detail/fake_world.h"
#include "tessera/debug/explain.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/register.h"
#include "tessera/rules/detail/meta_call.h"
#include "tessera/testing/detail/op_call.h"
#include "tessera/testing/detail/sample_maker.h"
#include "tessera/testing/rule_oracle.h"

#include <ATen/ops/complex.h>

#include <algorithm>
#include <charconv>
#include <ostream>

namespace tessera::cli {
namespace {

using testing::Sample;

std::vector<int64_t> read_ints(std::string_view text, char between, const std::string& full_text) {
  std::vector<int64_t> values;
  while (!text.empty()) {
    int64_t value = 0;
    const auto end = std::min(text.find(between), text.size());
    const auto [stop, error] = std::from_chars(text.data(), text.data() + end, value);
    TESSERA_CHECK(error == std::errc() && stop == text.data() + end, UsageError, "'", full_text,
                  "' is not a list of integers");
    values.push_back(value);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return values;
}

// "5x3", "i5x3", "b5x3", "c5x3"; "": a tensor without dims. The placements after ':' are in `placements`.
at::Tensor read_tensor(const std::string& text, std::vector<Placements>& placements) {
  const auto colon = text.find(':');
  placements.push_back(colon == std::string::npos ? Placements{}
                                                  : parse_placements("[" + text.substr(colon + 1) + "]"));
  std::string_view sizes_text = std::string_view(text).substr(0, colon);
  const char kind = !sizes_text.empty() && std::string_view("ibc").find(sizes_text[0]) != std::string_view::npos
                        ? sizes_text[0]
                        : 'f';
  if (kind != 'f') sizes_text.remove_prefix(1);
  const auto sizes = read_ints(sizes_text, 'x', text);
  switch (kind) {
    case 'i':
      return testing::integers(sizes);
    case 'b':
      return testing::mask(sizes);
    case 'c':
      return at::complex(testing::numbers(sizes), testing::numbers(sizes).mul(0.5));
    default:
      return testing::numbers(sizes);
  }
}

c10::IValue read_value(const std::string& text) {
  if (text == "true" || text == "false") return text == "true";
  if (text == "none") return {};
  if (text.starts_with("[") && text.ends_with("]")) return read_ints(text.substr(1, text.size() - 2), ',', text);
  char* end = nullptr;
  const int64_t number = std::strtoll(text.c_str(), &end, 10);
  if (!text.empty() && *end == '\0') return number;
  const double real = std::strtod(text.c_str(), &end);
  if (!text.empty() && *end == '\0') return real;
  return text;
}

// One call, and the placements of its tensors in the order of the call.
struct TextCall {
  Sample sample;
  std::vector<Placements> placements;
};

TextCall read_call(const std::string& op, const std::vector<std::string>& words) {
  TextCall call{{op, {}, {}}, {}};
  const auto& arguments = testing::find_op(op).schema().arguments();
  size_t used = 0;
  auto word = words.begin();
  const auto is_tensor_word = [&] { return word != words.end() && word->find('=') == std::string::npos; };
  for (const auto& argument : arguments) {
    const auto type = argument.type()->str();
    const auto named =
        std::find_if(words.begin(), words.end(), [&](const auto& w) { return w.starts_with(argument.name() + "="); });
    if (named != words.end()) {
      call.sample.args.push_back(read_value(named->substr(argument.name().size() + 1)));
      used++;
    } else if ((type == "Tensor" || type == "Tensor?") && is_tensor_word()) {
      call.sample.args.emplace_back(read_tensor(*word++, call.placements));
      used++;
    } else if (type == "Tensor[]") {
      c10::List<at::Tensor> list;
      for (; is_tensor_word(); ++word, used++) list.push_back(read_tensor(*word, call.placements));
      call.sample.args.emplace_back(std::move(list));
    } else if (argument.default_value()) {
      call.sample.args.push_back(*argument.default_value());
    } else {
      TESSERA_CHECK(argument.type()->kind() == c10::TypeKind::OptionalType, UsageError, op, ": the argument '",
                    argument.name(), "' of type ", type, " is missing; the op is ", testing::find_op(op).schema());
      call.sample.args.emplace_back();
    }
  }
  TESSERA_CHECK(used == words.size(), UsageError, op, ": ", words.size(), " arguments given, ", used,
                " of them fit its schema ", testing::find_op(op).schema());
  return call;
}

std::string strategy_text(const rules::Strategy& strategy) {
  std::string text;
  for (size_t i = 0; i < strategy.in.size(); i++) text += (i ? ", " : "") + to_string(strategy.in[i]);
  if (!strategy.out.empty()) text += " -> ";
  for (size_t i = 0; i < strategy.out.size(); i++) text += (i ? ", " : "") + to_string(strategy.out[i]);
  return text;
}

std::vector<std::string> strategies_of_sample(const Sample& sample) {
  const auto* rule = rules::registry().find(sample.op);
  std::vector<std::string> lines;
  if (!rule) return lines;
  const testing::OpCall call(sample);
  const auto result = rules::evaluate(*rule, testing::find_op(sample.op), call.query());
  if (result.follow) lines.emplace_back("a view: the placements of the input determine those of the output");
  for (const auto& strategy : result.strategies)
    lines.push_back(strategy_text(strategy) + (strategy.special ? "  by " + result.special : ""));
  return lines;
}

}  // namespace

std::vector<std::string> strategies_of(const std::string& op, const std::vector<std::string>& call) {
  return strategies_of_sample(read_call(op, call).sample);
}

void show_op(const std::string& op, const std::vector<std::string>& call, bool json, std::ostream& out) {
  const auto found = testing::find_op(op);
  const auto coverage = coverage_of(op);
  const auto lines = call.empty() ? std::vector<std::string>{} : strategies_of(op, call);
  if (json) {
    Json::Array list;
    for (const auto& line : lines) list.emplace_back(line);
    out << Json(Json::Object{{"op", op},
                             {"how", std::string(to_string(coverage.how))},
                             {"detail", coverage.detail},
                             {"schema", c10::str(found.schema())},
                             {"strategies", std::move(list)}})
               .dump()
        << '\n';
    return;
  }
  out << found.schema() << '\n' << to_string(coverage.how);
  if (!coverage.detail.empty()) out << ": " << coverage.detail;
  out << '\n';
  for (const auto& line : lines) out << "  " << line << '\n';
  if (call.empty()) out << "Give the sizes of its tensors to see the strategies of a call.\n";
}

namespace {

// Samples of all ops of the families whose arguments can be made from the schema: tensors of one size and numbers.
std::vector<Sample> samples_of_elementwise_ops() {
  std::vector<Sample> samples;
  for (const char* family : {"pointwise", "foreach"})
    for (const auto& op : testing::ops_of_family(family)) {
      try {
        for (const auto& sample : testing::samples_by_schema(op)) {
          const testing::OpCall call(sample);
          auto tensors = call.tensors();
          for (auto& t : tensors) t = t.clone();
          call.run(tensors);  // throws if the op does not accept these arguments
          if (!op.ends_with(".out")) samples.push_back(sample);
        }
      } catch (const c10::Error&) {
        continue;  // one value for all tensors of a list, for example
      }
    }
  return samples;
}

}  // namespace

bool verify_op(const std::string& op, const std::vector<std::string>& call, bool json, std::ostream& out) {
  std::vector<Sample> samples;
  if (!call.empty())
    samples.push_back(read_call(op, call).sample);
  else
    samples = op.empty() ? samples_of_elementwise_ops() : testing::samples_by_schema(op);
  int64_t strategies = 0, cases = 0;
  Json::Array wrong;
  for (const auto& sample : samples) {
    const auto report = testing::verify_rule(sample);
    strategies += report.strategies;
    cases += report.cases;
    for (const auto& line : report.wrong) wrong.emplace_back(report.op + "  " + line);
  }
  const bool right = wrong.empty();
  if (json) {
    out << Json(Json::Object{{"calls", static_cast<int64_t>(samples.size())},
                             {"strategies", strategies},
                             {"cases", cases},
                             {"wrong", std::move(wrong)}})
               .dump()
        << '\n';
    return right;
  }
  for (const auto& line : wrong) out << "WRONG  " << line.text() << '\n';
  out << samples.size() << " calls, " << strategies << " strategies, " << cases << " cases, " << wrong.size()
      << " wrong\n";
  if (op.empty())
    out << "These are the ops whose arguments can be made from the schema. For another op, name it and give the sizes "
           "of "
           "its tensors; the tests of the rules have samples of every op.\n";
  return right;
}

void explain_op(const std::string& op, const std::vector<std::string>& call, const std::string& mesh_text, bool json,
                std::ostream& out) {
  auto text = read_call(op, call);
  int64_t ranks = 1;
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  for (std::string_view rest = mesh_text; !rest.empty();) {
    const auto end = std::min(rest.find(','), rest.size());
    const auto axis = rest.substr(0, end);
    const auto equal = axis.find('=');
    TESSERA_CHECK(equal != std::string_view::npos, UsageError, "--mesh '", mesh_text, "': write dp=2,tp=4");
    names.emplace_back(axis.substr(0, equal));
    shape.push_back(read_ints(axis.substr(equal + 1), ',', mesh_text).at(0));
    ranks *= shape.back();
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  const FakeWorld world(ranks);
  const auto mesh = init_device_mesh("cpu", shape, names);
  size_t next = 0;
  const auto distributed = [&](const at::Tensor& t) -> at::Tensor {
    auto placements = text.placements[next++];
    if (placements.empty()) placements.assign(shape.size(), Replicate());
    return distribute_tensor(t, mesh, placements);
  };
  for (auto& value : text.sample.args) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = distributed(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(distributed(t));
      value = std::move(list);
    }
  }
  const auto lines = explain(op, text.sample.args);
  if (json)
    out << Json(Json::Object{{"op", op}, {"mesh", mesh_text}, {"explanation", lines}}).dump() << '\n';
  else
    out << lines;
}

}  // namespace tessera::cli
