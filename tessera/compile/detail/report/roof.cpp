#include "tessera/compile/detail/report/roof.h"

#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/numerics/detail/vector/tiled_product.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>

namespace tessera::compiler {
namespace {

template <class F>
double best_seconds(const F& f) {
  using Clock = std::chrono::steady_clock;
  double best = std::numeric_limits<double>::max();
  for (int i = 0; i < 4; i++) {
    const auto begin = Clock::now();
    f();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

Roof measure_roof() {
  const OpModesOff modes_off;
  const at::AutoDispatchBelowADInplaceOrView below;
  constexpr int64_t kSize = 1024, kCopied = int64_t{1} << 24;  // elements
  const auto a = at::ones({kSize, kSize}), b = at::ones({kSize, kSize});
  auto out = at::empty({kSize, kSize}), from = at::ones({kCopied}), to = at::empty({kCopied});
  const auto product =
      std::min(best_seconds([&] { at::mm_out(out, a, b); }), best_seconds([&] { numerics::tiled_product(out, a, b); }));
  const auto copy = best_seconds([&] { to.copy_(from); });
  return {2e-9 * kSize * kSize * kSize / product, 2e-9 * 4 * kCopied / copy};
}

double elements(const Program& program, const ValueId id) { return static_cast<double>(program[id].type.numel()); }

// 2 m n k of a product with this result and this left operand.
double flops_of_product(const Program& program, ValueId out, ValueId left) {
  return 2 * elements(program, out) * static_cast<double>(program[left].type.sizes.back());
}

double flops_of_attention(const Program& program, ValueId query, ValueId key, bool causal, bool backward) {
  const auto pairs = elements(program, query) * static_cast<double>(program[key].type.sizes[2]);
  return (backward ? 10 : 4) * pairs * (causal ? 0.5 : 1);  // two products in forward, five in backward
}

double flops_of_kernel(const Program& program, const Node& node, const std::string& name) {
  const auto &outs = std::get<ValueList>(node.args[0]), &ins = std::get<ValueList>(node.args[1]);
  if (name.starts_with("matmul")) return flops_of_product(program, outs[0], ins[0]);
  if (!name.starts_with("attention")) return 0;
  const auto* numbers = constant_or_null(node.args[2]);
  const bool causal = numbers && numbers->isDoubleList() && numbers->toDoubleVector()[0] != 0;
  const bool backward = name == "attention_backward";
  return flops_of_attention(program, ins[backward ? 1 : 0], ins[backward ? 2 : 1], causal, backward);
}

std::string kernel_of(const Node& node) {
  const auto* name = node.name() == "tessera.cpu_kernel" ? constant_or_null(node.args[3]) : nullptr;
  return name && name->isString() ? name->toStringRef() : "";
}

double flops_of(const Program& program, const Node& node) {
  if (const auto kernel = kernel_of(node); !kernel.empty()) return flops_of_kernel(program, node, kernel);
  const auto name = node.name();
  const size_t left = name == "aten.mm" || name == "aten.bmm" ? 0 : 1;
  if (left == 1 && name != "aten.addmm" && name != "aten.baddbmm") return 0;
  const auto *out = std::get_if<ValueId>(&node.results[0]), *a = std::get_if<ValueId>(&node.args[left]);
  return out && a && *out != kNone && *a != kNone ? flops_of_product(program, *out, *a) : 0;
}

}  // namespace

const Roof& measured_roof() {
  static const Roof roof = measure_roof();
  return roof;
}

NodeWork work_of_node(const Program& program, const Node& node) {
  if (const auto kind = kind_of(node); kind == OpKind::Collective || kind == OpKind::Wait) return {};
  std::set<ValueId> used;
  node.each_read([&](ValueId id) { used.insert(id); });
  node.each_result([&](ValueId id) { used.insert(id); });
  NodeWork work{flops_of(program, node)};
  for (const auto id : used) work.bytes += static_cast<double>(program[id].type.bytes());
  return work;
}

double milliseconds_at(const Roof& roof, const NodeWork& work) {
  return 1e-6 * std::max(work.flops / roof.gflops, work.bytes / roof.gigabytes_per_second);
}

std::string name_in_report(const Node& node) {
  if (is_generated(node)) return "kernel " + generated_name(node);
  const auto kernel = kernel_of(node);
  return kernel.empty() ? node.name() : node.name() + " " + kernel;
}

}  // namespace tessera::compiler
