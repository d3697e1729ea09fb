#include "tessera/base/detail/json.h"
#include "tessera/cli/rules_report.h"
#include "tessera/dtensor/detail/own_kernels.h"
#include "tessera/propagate/detail/route.h"
#include "tessera/rules/detail/gathered.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <ostream>

namespace tessera::cli {
namespace {

using How = OpCoverage::How;

constexpr How kAll[] = {How::Rule,       How::Kernel,   How::Composite, How::Decomposed,
                        How::Functional, How::Gathered, How::None,      How::Absent};
constexpr std::string_view kNoReason = "no rule yet";

std::optional<c10::OperatorHandle> find_overload(const std::string& op) {
  const auto dot = op.find('.');
  return c10::Dispatcher::singleton().findSchema(
      {op.substr(0, dot), dot == std::string::npos ? std::string() : op.substr(dot + 1)});
}

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

OpCoverage with_rule(const std::string& op, const std::string& family) {
  if (family == "decomposed") return {op, How::Decomposed, "LibTorch's composite code", false};
  if (family == "gathered") return {op, How::Gathered, std::string(rules::gathered_reason(op)), true};
  return {op, How::Rule, family, false};
}

}  // namespace

std::string_view to_string(How how) {
  switch (how) {
    case How::Rule:
      return "rule";
    case How::Kernel:
      return "own kernel";
    case How::Composite:
      return "composite";
    case How::Decomposed:
      return "decomposed";
    case How::Functional:
      return "functional form";
    case How::Gathered:
      return "gathered";
    case How::None:
      return "no strategy";
    case How::Absent:
      return "not in this LibTorch";
  }
  return "";
}

OpCoverage coverage_of(const std::string& op) {
  const auto found = find_overload(op);
  if (!found) return {op, How::Absent, "", false};
  if (detail::ops_with_own_kernel().contains(op)) return {op, How::Kernel, "", false};
  const auto& entry = propagate::entry_of(*found);
  if (const auto* rule = entry.rule()) return with_rule(op, rule->family);
  if (found->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
    return {op, How::Composite, "LibTorch decomposes it above dispatch", false};
  const auto route = propagate::route_of(entry);
  switch (route.route) {
    case propagate::Route::Functional: {
      const auto& inputs = route.functional->schema().arguments();
      const bool has_tensors = std::any_of(inputs.begin(), inputs.end(), [](const auto& argument) {
        return argument.type()->str().find("Tensor") != std::string::npos;
      });
      if (!has_tensors) return {op, How::Functional, "a factory: every rank computes the full tensor", false};
      const auto form = coverage_of(name_of(*route.functional));
      return {op, How::Functional, form.op + (form.gathered ? ": " + form.detail : ""), form.gathered};
    }
    case propagate::Route::Gathered:
      return {op, How::Gathered, std::string(kNoReason), true};
    case propagate::Route::Decompose:
      return {op, How::Decomposed, "LibTorch's composite code", false};
    case propagate::Route::Rule:
    case propagate::Route::None:
      break;
  }
  return {op, How::None, "", false};
}

std::vector<OpCoverage> coverage_of_list(std::string_view names) {
  std::vector<OpCoverage> ops;
  while (!names.empty()) {
    const auto end = std::min(names.find('\n'), names.size());
    if (end > 0) ops.push_back(coverage_of(std::string(names.substr(0, end))));
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return ops;
}

void print_coverage(const std::vector<OpCoverage>& ops, std::ostream& out) {
  std::map<How, int> count;
  for (const auto& op : ops) count[op.how]++;
  const auto gathered = std::count_if(ops.begin(), ops.end(), [](const auto& op) { return op.gathered; });
  out << ops.size() << " overloads for which PyTorch's DTensor has a strategy\n";
  for (const auto how : kAll)
    if (count[how] > 0) out << "  " << std::left << std::setw(21) << to_string(how) << count[how] << '\n';
  out << "without a strategy: " << count[How::None] << "\ngathered: " << gathered << '\n';
  for (const auto& op : ops)
    if (op.gathered) out << "  " << std::left << std::setw(44) << op.op << ' ' << op.detail << '\n';
  for (const auto& op : ops)
    if (op.how == How::None) out << "no strategy  " << op.op << '\n';
}

void print_coverage_json(const std::vector<OpCoverage>& ops, std::ostream& out) {
  Json::Array list;
  for (const auto& op : ops)
    list.emplace_back(Json::Object{{"op", op.op},
                                   {"how", std::string(to_string(op.how))},
                                   {"detail", op.detail},
                                   {"gathered", int64_t{op.gathered}}});
  out << Json(std::move(list)).dump() << '\n';
}

void print_missing(const std::vector<OpCoverage>& ops, bool json, std::ostream& out) {
  std::vector<OpCoverage> missing;
  for (const auto& op : ops)
    if (op.how == How::None || (op.gathered && op.detail.find(kNoReason) != std::string::npos)) missing.push_back(op);
  if (json) return print_coverage_json(missing, out);
  for (const auto& op : missing) out << std::left << std::setw(44) << op.op << ' ' << to_string(op.how) << '\n';
  out << missing.size() << " of " << ops.size() << " overloads\n";
}

}  // namespace tessera::cli
