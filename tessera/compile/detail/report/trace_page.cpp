#include "tessera/compile/detail/report/trace_page.h"

#include "tessera/compile/detail/ir/collective.h"
#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/report/curve_svg.h"
#include "tessera/compile/detail/report/html.h"
#include "tessera/compile/detail/report/program_html.h"
#include "tessera/compile/detail/report/roof.h"
#include "tessera/compile/detail/report/trace_page_style.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <ostream>
#include <sstream>

namespace tessera::compiler {
namespace {

constexpr size_t kListedBuffers = 20, kListedNodes = 20;

std::string fixed_point(double number, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << number;
  return text.str();
}

struct CollectiveTotals {
  int64_t count = 0, bytes = 0;
};
CollectiveTotals totals_of(const Program& program) {
  CollectiveTotals totals;
  for (const auto& node : program.nodes)
    if (kind_of(node) == OpKind::Collective) {
      totals.count++;
      totals.bytes += collective_of(program, node).bytes;
    }
  return totals;
}

bool is_pass(const CompileTrace& trace, size_t stage) { return stage > 0 && stage + 1 < trace.stages.size(); }

void write_passes(std::ostream& out, const CompileTrace& trace) {
  out << "<h2>Passes</h2>\n<table id=passes>\n";
  html::row(out, {"", "pass", "matched", "ms", "nodes after", "collectives", "bytes sent", "peak memory", "note"},
            "th");
  for (size_t s = 0; s < trace.stages.size(); s++) {
    const auto& [pass, program] = trace.stages[s];
    const auto totals = totals_of(program);
    const bool ran = is_pass(trace, s);
    html::row(out,
              {std::to_string(s), "<a href=\"#stage" + std::to_string(s) + "\">" + html::escaped(pass.name) + "</a>",
               ran ? std::to_string(pass.matched.times) : "", ran ? fixed_point(pass.milliseconds, 2) : "",
               std::to_string(program.nodes.size()), std::to_string(totals.count), html::bytes(totals.bytes),
               html::bytes(memory_curve(program).peak()), html::escaped(pass.matched.note)});
  }
  out << "</table>\n";
}

void write_collectives(std::ostream& out, const Program& program, size_t first_node) {
  out << "<h2>Collectives, in order</h2>\n";
  if (totals_of(program).count == 0) {
    out << "<p>The program has no collectives.</p>\n";
    return;
  }
  out << "<div class=long><table id=collectives>\n";
  html::row(out, {"", "line", "kind", "bytes", "group", "ranks", "nodes until wait", "module"}, "th");
  int64_t number = 0;
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto& node = program.nodes[n];
    if (kind_of(node) != OpKind::Collective) continue;
    const auto collective = collective_of(program, node);
    std::ostringstream kind, ranks;
    if (collective.kind == comm::CommKind::Count)
      kind << node.name();
    else
      kind << collective.kind;
    std::string group;
    if (collective.group >= 0) {
      const auto& info = program.groups[static_cast<size_t>(collective.group)];
      group = info.name;
      for (const auto rank : info.ranks) ranks << (ranks.tellp() > 0 ? ", " : "") << rank;
    }
    const auto wait = wait_of(program, n);
    html::row(out, {std::to_string(number++), std::to_string(first_node + n + 1), html::escaped(kind.str()),
                    std::to_string(collective.bytes), html::escaped(group), ranks.str(),
                    wait < program.nodes.size() ? std::to_string(wait - n - 1) : "-", html::escaped(node.module)});
  }
  out << "</table></div>\n";
}

void write_inputs(std::ostream& out, const Program& program) {
  struct RoleTotals {
    int64_t count = 0, bytes = 0;
  };
  std::map<Role, RoleTotals> by_role;
  for (const auto& input : program.inputs) {
    auto& sum = by_role[input.role];
    sum.count++;
    sum.bytes += program[input.value].type.bytes();
  }
  out << "<h2>External memory</h2>\n<table id=inputs>\n";
  html::row(out, {"role", "values", "bytes"}, "th");
  for (const auto& [role, sum] : by_role)
    html::row(out, {c10::str(role), std::to_string(sum.count), html::bytes(sum.bytes)});
  out << "</table>\n";
}

void write_buffers(std::ostream& out, const CompileTrace& trace, size_t first_node) {
  const auto& program = trace.stages.back().program;
  const auto bytes = program.buffer_bytes();
  const auto alive = lifetimes(program);
  const auto external = program.external_buffers();
  std::vector<ValueId> first(bytes.size(), kNone);
  for (const auto& node : program.nodes)
    node.each_result([&](ValueId id) {
      auto& at = first[static_cast<size_t>(program.buffer_of(id))];
      if (at == kNone) at = id;
    });
  std::vector<char> is_output(bytes.size(), 0);
  for (const auto& output : program.outputs)
    if (output.value != kNone) is_output[static_cast<size_t>(program.buffer_of(output.value))] = 1;
  std::vector<size_t> order;
  for (size_t b = 0; b < bytes.size(); b++)
    if (!external[b] && alive[b].first >= 0 && first[b] != kNone) order.push_back(b);
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return bytes[x] > bytes[y]; });
  out << "<h2>Largest buffers of " << order.size() << "</h2>\n<table id=buffers>\n";
  html::row(out, {"value", "type", "bytes", "lines", "where"}, "th");
  for (size_t i = 0; i < std::min(order.size(), kListedBuffers); i++) {
    const auto b = order[i];
    const auto offset = trace.memory.offsets[b];
    const auto line = [&](int32_t node) { return std::to_string(first_node + static_cast<size_t>(node) + 1); };
    html::row(out,
              {"%" + std::to_string(first[b]), html::escaped(c10::str(program[first[b]].type)), html::bytes(bytes[b]),
               line(alive[b].first) + " to " + (is_output[b] ? "the end" : line(alive[b].last)),
               is_output[b]                     ? "output"
               : offset == MemoryPlan::kOutside ? "allocated by its op"
                                                : "arena + " + std::to_string(offset)});
  }
  out << "</table>\n";
}

void write_stages(std::ostream& out, const CompileTrace& trace, const std::vector<ProgramLines>& texts) {
  out << "<h2>The program, pass by pass</h2>\n";
  for (size_t s = 0; s < trace.stages.size(); s++) {
    const auto& pass = trace.stages[s].pass;
    const bool changed = s > 0 && texts[s].lines != texts[s - 1].lines;
    out << "<section id=stage" << s << "><h3>" << s << " " << html::escaped(pass.name)
        << (s > 0 && !changed ? " <small>no change</small>" : "") << "</h3>\n";
    if (changed) write_diff(out, texts[s - 1], texts[s]);
    out << "<details" << (s == 0 ? " open" : "") << "><summary>all " << texts[s].lines.size() << " lines</summary>\n";
    write_program(out, texts[s], c10::str("text", s));
    out << "</details></section>\n";
  }
}

std::string link_to_kernel(const Node& node) {
  const auto name = html::escaped(name_in_report(node));
  return is_generated(node) ? "<a href=\"#kernel-" + html::escaped(generated_name(node)) + "\">" + name + "</a>" : name;
}

// The share of the roof that work reaches; "" for ops that the roof of the CPU says nothing about.
std::string share_of_roof(const Roof* roof, const NodeWork& work, double milliseconds) {
  if (!roof || milliseconds <= 0 || work.bytes == 0) return "";
  return fixed_point(100 * milliseconds_at(*roof, work) / milliseconds, 0) + " %";
}

// Ops by name, kernels one by one, the slowest first; then the slowest lines.
void write_times(std::ostream& out, const Program& program, const std::vector<double>& milliseconds,
                 size_t first_node) {
  if (milliseconds.empty()) return;
  struct OpTotals {
    std::string link;
    int64_t calls = 0;
    double milliseconds = 0;
    NodeWork work = {};
  };
  std::map<std::string, OpTotals> by_name;
  std::vector<size_t> slowest;
  double total = 0;
  for (size_t n = 0; n < program.nodes.size(); n++) {
    if (milliseconds[n] == 0) continue;  // a view
    auto& totals = by_name[name_in_report(program.nodes[n])];
    totals.link = link_to_kernel(program.nodes[n]);
    totals.calls++;
    totals.milliseconds += milliseconds[n];
    totals.work += work_of_node(program, program.nodes[n]);
    total += milliseconds[n];
    slowest.push_back(n);
  }
  const bool on_cpu = std::all_of(program.values.begin(), program.values.end(),
                                  [](const Value& value) { return value.type.device.is_cpu(); });
  const auto* roof = on_cpu ? &measured_roof() : nullptr;
  std::vector<OpTotals> ops;
  for (auto& [name, totals] : by_name) ops.push_back(std::move(totals));
  std::stable_sort(ops.begin(), ops.end(),
                   [](const auto& a, const auto& b) { return a.milliseconds > b.milliseconds; });
  out << "<h2>Times of the first run</h2>\n<p>" << fixed_point(total, 3) << " ms in " << slowest.size()
      << " kernels. One-time costs of the first call of a kernel are included.";
  if (roof)
    out << " The roof of this machine: " << fixed_point(roof->gflops, 0) << " GFLOP/s (a product of 1024 x 1024), "
        << fixed_point(roof->gigabytes_per_second, 1)
        << " GB/s (a copy). An op whose operands are in a cache can be above it.";
  out << "</p>\n<div class=long><table id=times>\n";
  html::row(out, {"op or kernel", "calls", "ms", "share", "bytes", "MFLOP", "of the roof"}, "th");
  for (const auto& op : ops)
    html::row(out,
              {op.link, std::to_string(op.calls), fixed_point(op.milliseconds, 3),
               fixed_point(100 * op.milliseconds / total, 1) + " %", html::bytes(static_cast<int64_t>(op.work.bytes)),
               fixed_point(1e-6 * op.work.flops, 1), share_of_roof(roof, op.work, op.milliseconds)});
  out << "</table></div>\n";
  std::stable_sort(slowest.begin(), slowest.end(),
                   [&](size_t a, size_t b) { return milliseconds[a] > milliseconds[b]; });
  slowest.resize(std::min(slowest.size(), kListedNodes));
  out << "<table id=slowest>\n";
  html::row(out, {"line", "op or kernel", "ms", "of the roof", "module"}, "th");
  for (const auto n : slowest) {
    const auto& node = program.nodes[n];
    html::row(out, {std::to_string(first_node + n + 1), link_to_kernel(node), fixed_point(milliseconds[n], 3),
                    share_of_roof(roof, work_of_node(program, node), milliseconds[n]), html::escaped(node.module)});
  }
  out << "</table>\n";
}

void write_kernels(std::ostream& out, const Program& program) {
  if (program.kernels.empty()) return;
  out << "<h2>Generated functions</h2>\n";
  for (const auto& [name, source] : program.kernels)
    out << "<details class=kernel open id=\"kernel-" << html::escaped(name) << "\"><summary>" << html::escaped(name)
        << "</summary><pre>" << html::escaped(source) << "</pre></details>\n";
}

// The data of the script: memory in use by node, and the element with the text of the nodes.
void write_data(std::ostream& out, const CompileTrace& trace, const MemoryCurve& curve, size_t first_node) {
  out << "<script>const live = [";
  for (size_t n = 0; n < curve.own.size(); n++) out << (n ? "," : "") << curve.own[n];
  out << "], firstNode = " << first_node << ", runs = \"text" << trace.stages.size() - 1 << "\";\n"
      << kPageScript << "</script>\n";
}

}  // namespace

void trace_page(std::ostream& out, const CompileTrace& trace, const std::string& title) {
  const auto& program = trace.stages.back().program;
  std::vector<ProgramLines> texts;
  for (const auto& stage : trace.stages) texts.emplace_back(stage.program);
  const auto first_node = texts.back().first_node;
  const auto curve = memory_curve(program, &trace.memory);
  const auto totals = totals_of(program);
  out << "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport "
         "content=\"width=device-width\"><title>"
      << html::escaped(title) << "</title>\n<style>" << kPageStyle << "</style></head><body>\n<h1>"
      << html::escaped(title) << "</h1>\n<p>The " << trace.what << " of rank " << trace.rank << " of " << trace.ranks
      << ": " << trace.stages.front().program.nodes.size() << " nodes when traced, " << program.nodes.size()
      << " after all passes; " << totals.count << (totals.count == 1 ? " collective of " : " collectives of ")
      << html::bytes(totals.bytes) << " per call; an arena of " << html::bytes(trace.memory.arena_bytes) << ".</p>\n";
  if (!trace.recompiled_because.empty())
    out << "<p id=recompiled>Recompiled, because " << html::escaped(trace.recompiled_because) << ".</p>\n";
  write_passes(out, trace);
  write_times(out, program, trace.milliseconds, first_node);
  out << "<h2>Memory in use</h2>\n";
  write_curve(out, program, curve, trace.memory);
  write_collectives(out, program, first_node);
  write_inputs(out, program);
  write_buffers(out, trace, first_node);
  write_stages(out, trace, texts);
  write_kernels(out, program);
  write_data(out, trace, curve, first_node);
  out << "</body></html>\n";
}

}  // namespace tessera::compiler
