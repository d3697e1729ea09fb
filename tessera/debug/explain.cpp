#include "tessera/debug/explain.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/register.h"
#include "tessera/redistribute/detail/execute.h"

#include <cmath>
#include <iomanip>
#include <sstream>

namespace tessera {
namespace {

using c10::IValue;
using propagate::Call;
using propagate::Decision;
using propagate::OpEntry;
using propagate::Trace;

constexpr int kMostElements = 2;  // shown of a list op with one decision per element
constexpr size_t kMostResults = 8;

const OpEntry& entry_called(std::string_view name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto dot = name.find('.');
  const std::string base(name.substr(0, dot)), overload(dot == name.npos ? "" : name.substr(dot + 1));
  if (auto op = dispatcher.findSchema({base, overload})) return propagate::entry_of(*op);
  std::string others;
  for (const auto& known : dispatcher.getAllOpNames())
    if (known.name == base) others += (others.empty() ? "" : ", ") + base + "." + known.overload_name;
  TESSERA_CHECK(!others.empty(), UsageError, "explain: unknown op '", name,
                "'; write it like aten::mm or aten::add.Tensor");
  TESSERA_FAIL(UsageError, "explain: unknown op '", name, "'; its overloads are ", others);
}

void complete(const OpEntry& entry, std::vector<IValue>& args) {
  const auto& known = entry.op.schema().arguments();
  TESSERA_CHECK(args.size() <= known.size(), UsageError, "explain: ", args.size(), " arguments are too many for ",
                entry.op.schema());
  for (size_t i = args.size(); i < known.size(); i++) {
    TESSERA_CHECK(known[i].default_value(), UsageError, "explain: the argument '", known[i].name(), "' is missing for ",
                  entry.op.schema());
    args.push_back(*known[i].default_value());
  }
  for (size_t i = 0; i < args.size(); i++)
    TESSERA_CHECK(args[i].isNone() || args[i].isTensor() == (entry.kinds[i] == propagate::ArgKind::Tensor), UsageError,
                  "explain: the argument '", known[i].name(), "' is a ", args[i].tagKind(), "; the op is ",
                  entry.op.schema());
}

detail::MeshState* mesh_among(const IValue& value) {
  if (value.isTensor())
    return is_dtensor(value.toTensor()) ? detail::meta_of(value.toTensor()).spec->mesh.state() : nullptr;
  if (!value.isList()) return nullptr;
  for (const auto& element : value.toListRef())
    if (auto* mesh = mesh_among(element)) return mesh;
  return nullptr;
}

void print_axis(std::ostream& out, const Trace::Axis& axis, const detail::MeshState& mesh) {
  out << "  axis " << mesh.axis_name(axis.axis) << ", " << mesh.shape[axis.axis] << " ranks";
  if (axis.element >= 0) out << ", element " << axis.element;
  out << "\n";
  for (size_t i = 0; i < axis.candidates.size(); i++) {
    const auto& candidate = axis.candidates[i];
    out << (static_cast<int>(i) == axis.chosen ? "    * " : "      ");
    if (std::isinf(candidate.cost))
      out << std::setw(12) << "impossible";
    else
      out << std::setw(9) << std::fixed << std::setprecision(3) << candidate.cost << " us";
    out << "  ";
    auto list = [&](PlacementsRef placements) {
      for (size_t p = 0; p < placements.size(); p++) out << (p ? ", " : "") << placements[p];
    };
    list(candidate.in);
    if (!candidate.out.empty()) out << " -> ";  // an in-place op has no new output
    list(candidate.out);
    out << "\n";
  }
}

void print_strategies(std::ostream& out, const Trace& trace, const detail::MeshState& mesh) {
  int more = 0;
  for (const auto& axis : trace.axes)
    if (axis.element < kMostElements)
      print_axis(out, axis, mesh);
    else
      more = axis.element - kMostElements + 1;
  if (more > 0) out << "  and " << more << " more elements\n";
}

void print_decision(std::ostream& out, const Call& call, const Decision& decision) {
  switch (decision.kind) {
    case Decision::Kind::Decompose:
      out << "  no rule; it decomposes into other ops, each with its own decision\n";
      return;
    case Decision::Kind::Functional:
      out << "  no rule; " << decision.special->operator_name()
          << " runs, and its result is copied into the argument\n";
      return;
    case Decision::Kind::Replicated:
      out << "  gathered: all inputs are redistributed to Replicate, and so is the result\n";
      break;
    case Decision::Kind::Strategies:
      break;
  }
  for (size_t i = 0; i < decision.want.size(); i++)
    if (const auto& want = decision.want[i])
      out << "  input " << i << ": "
          << redistribute::to_string(redistribute::plan_between(*call.tensors[i].spec, *want), call.mesh->names)
          << "\n";
  for (size_t i = 0; i < decision.outs.size() && i < kMostResults; i++)
    out << "  result: " << c10::IntArrayRef(decision.outs[i].sizes) << to_string(decision.outs[i].placements) << "\n";
  if (decision.outs.size() > kMostResults) out << "  and " << decision.outs.size() - kMostResults << " more results\n";
}

}  // namespace

std::string explain(std::string_view op, std::vector<IValue> args) {
  detail::register_kernels();
  const auto& entry = entry_called(op);
  complete(entry, args);
  detail::MeshState* mesh = nullptr;
  for (size_t i = 0; i < args.size() && !mesh; i++) mesh = mesh_among(args[i]);
  TESSERA_CHECK(mesh, UsageError, "explain: no argument of ", entry.name, " is a distributed tensor");

  const auto call = detail::make_call(entry, args, mesh);
  std::ostringstream out;
  out << describe(call) << "\n";
  // A composite op decomposes above autograd, so only its parts reach the dispatcher.
  if (!entry.rule() && entry.op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    out << "  no rule; it decomposes into other ops, each with its own decision. "
           "Run it in a CommDebugMode to see them.\n";
    return out.str();
  }
  Trace trace;
  try {
    const auto decision = propagate::choose_strategy(call, &trace);
    print_strategies(out, trace, *mesh);
    print_decision(out, call, *decision);
  } catch (const ShardingError& error) {
    print_strategies(out, trace, *mesh);
    out << "  " << error.what_without_backtrace() << "\n";
  }
  return out.str();
}

}  // namespace tessera
