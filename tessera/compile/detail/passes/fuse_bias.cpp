#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>
#include <optional>

// Adds a bias inside of the matrix product: the library adds it before it stores a tile.
//
//   %2: f32[6, 4] = aten.mm(%0, %1)
//   %3: f32[2, 3, 4] in %2 = aten._unsafe_view(%2, ...)      %2: f32[6, 4] = aten.addmm(%bias, %0, %1, 1, 1)
//   %4: f32[2, 3, 4] in %2 = aten.add_.Tensor(%3!, %bias, 1) -> %3: f32[2, 3, 4] in %2 = aten._unsafe_view(%2, ...)
//
// Law: mm(a, b) + bias = addmm(bias, a, b). The product is computed where the sum was; between them there may only be
// views. The sum is rounded once instead of twice, so bits differ from eager mode: on the CPU only with Numerics::Fast
// (fuse_cpu_bias), and not in bfloat16 and half, where one rounding less is a large difference.
namespace tessera::compiler {
namespace {

// A bias that is added to the product of node `product`.
struct BiasedProduct {
  size_t product, sum;
  ValueId bias;
};

// The result of a product without a bias: aten.mm, or tessera.cpu_kernel "matmul..."; kNone for other nodes.
ValueId product_result(const Node& node) {
  const auto& name = node.op.operator_name().name;
  if (name == "aten::mm" && node.results.size() == 1) return std::get<ValueId>(node.results[0]);
  const bool is_kernel = name == "tessera::cpu_kernel" && std::get<ValueList>(node.args[1]).size() == 2 &&
                         constant_or_null(node.args[3])->toStringRef().starts_with("matmul");
  return is_kernel ? std::get<ValueList>(node.args[0])[0] : kNone;
}

std::optional<BiasedProduct> biased_product(const Program& program, size_t product, c10::DeviceType device) {
  const auto result = product_result(program.nodes[product]);
  if (result == kNone) return {};
  const auto& type = program[result].type;
  const bool is_wide = type.dtype == c10::kFloat || type.dtype == c10::kDouble;
  if (type.device.type() != device || !type.is_contiguous() || (device == c10::kCPU && !is_wide)) return {};
  for (size_t n = product + 1; n < program.nodes.size(); n++) {
    const auto& node = program.nodes[n];
    if (is_view(program, node)) continue;
    if (node.name() != "aten.add_.Tensor" || !is_one(node.args[2])) return {};
    const auto into = std::get<ValueId>(node.args[0]);
    const auto* bias = std::get_if<ValueId>(&node.args[1]);
    if (program.buffer_of(into) != program.buffer_of(result) || !bias || *bias == kNone) return {};
    const auto &sum = program[into].type, &added = program[*bias].type;
    const bool fits = sum.numel() == type.numel() && sum.is_contiguous() && sum.dtype == type.dtype &&
                      added.dtype == type.dtype && added.sizes.size() == 1 && added.sizes[0] == type.sizes[1] &&
                      sum.sizes.back() == type.sizes[1] && added.is_contiguous() && added.device == type.device;
    if (!fits) return {};
    return BiasedProduct{product, n, *bias};
  }
  return {};
}

}  // namespace

namespace {

Matched fuse_bias_on(Program& program, c10::DeviceType device) {
  Matched matched;
  ReplacedValues replaced(program);
  std::vector<Node> kept;
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto found = biased_product(program, n, device);
    if (!found) {
      kept.push_back(std::move(program.nodes[n]));
      replaced.rewrite_reads(kept.back());
      continue;
    }
    auto product = std::move(program.nodes[n]);
    const auto result = product_result(product);
    std::vector<Node> of_product;  // views of the product follow it
    for (size_t v = n + 1; v < found->sum; v++) {
      auto& view = program.nodes[v];
      replaced.rewrite_reads(view);
      bool reads_product = false;
      view.each_read([&](ValueId id) { reads_product |= program.buffer_of(id) == program.buffer_of(result); });
      (reads_product ? of_product : kept).push_back(std::move(view));
    }
    if (product.name() == "aten.mm") {
      product.op = find_op("aten.addmm");
      product.args = {found->bias, product.args[0], product.args[1], c10::IValue(1), c10::IValue(1)};
    } else {
      std::get<ValueList>(product.args[1]).push_back(found->bias);
    }
    replaced.rewrite_reads(product);
    kept.push_back(std::move(product));
    for (auto& view : of_product) kept.push_back(std::move(view));
    const auto& sum = program.nodes[found->sum];
    replaced.set(std::get<ValueId>(sum.results[0]), replaced(std::get<ValueId>(sum.args[0])));
    n = found->sum;
    matched.times++;
  }
  replaced.rewrite_outputs(program);
  program.nodes = std::move(kept);
  return matched;
}

}  // namespace

Matched fuse_bias(Program& program) { return fuse_bias_on(program, c10::kCUDA); }
Matched fuse_cpu_bias(Program& program) { return fuse_bias_on(program, c10::kCPU); }

}  // namespace tessera::compiler
