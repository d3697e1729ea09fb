#include "tessera/compile/detail/codegen/product_choice.h"
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/passes/passes.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <map>
#include <optional>

// Replaces large matrix products on the CPU by our own (numerics/detail/vector/tiled_product.h) where these are faster.
//
//                                                           %3: f32[512, 256] = aten.empty_strided(...)
//   %3: f32[512, 256] = aten.addmm(%2, %0, %1, 1, 1)   ->   tessera.cpu_kernel([%3!], [%0, %1, %2], [], "matmul")
//
// Law: both compute a @ b + bias; sums are in another order, so bits differ from eager mode. Ranks must choose alike,
// or replicas would differ: in a program that communicates the choice is not measured, the tiled product is used.
namespace tessera::compiler {
namespace {

constexpr double kSmallestProduct = 1 << 20;  // multiplications; below, the copy of a transposed operand costs too much
constexpr int64_t kFewestRows = 8;  // and columns: fewer are read at the speed of memory, and summed in many parts

struct ProductArguments {
  ValueId out, a, b, bias;
};

std::optional<ProductArguments> product_of(const Node& node) {
  const auto name = node.name();
  if (name == "aten.mm")
    return ProductArguments{value_of(node.results[0]), value_of(node.args[0]), value_of(node.args[1]), kNone};
  if (name == "aten.addmm" && is_one(node.args[3]) && is_one(node.args[4]))
    return ProductArguments{value_of(node.results[0]), value_of(node.args[1]), value_of(node.args[2]),
                            value_of(node.args[0])};
  return {};
}

// Whether the matrix is transposed in memory; none if it has neither order.
std::optional<bool> is_transposed(const Type& type) {
  if (type.dtype != c10::kFloat || !type.device.is_cpu() || type.neg || type.sizes.size() != 2) return {};
  if (type.strides[1] == 1 && type.strides[0] >= type.sizes[1]) return false;
  if (type.strides[0] == 1 && type.strides[1] >= type.sizes[0]) return true;
  return {};
}

// Whether the tiled product is faster, by shape.
using Choices = std::map<codegen::ProductShape, bool>;

bool use_tiles(const Program& program, const ProductArguments& product, Choices& choices) {
  if (product.out == kNone || product.a == kNone || product.b == kNone) return false;
  const auto &out = program[product.out].type, &a = program[product.a].type, &b = program[product.b].type;
  const auto a_transposed = is_transposed(a), b_transposed = is_transposed(b);
  if (!a_transposed || !b_transposed || is_transposed(out) != false || !out.is_contiguous()) return false;
  const codegen::ProductShape shape{a.sizes[0],    b.sizes[1],    a.sizes[1],
                                    *a_transposed, *b_transposed, at::get_num_threads()};
  if (std::min(shape.m, shape.n) < kFewestRows) return false;
  if (static_cast<double>(shape.m) * static_cast<double>(shape.n) * static_cast<double>(shape.k) < kSmallestProduct)
    return false;
  if (product.bias != kNone) {
    const auto& bias = program[product.bias].type;
    if (bias.dtype != c10::kFloat || bias.sizes.size() != 1 || bias.sizes[0] != shape.n || !bias.is_contiguous() ||
        bias.neg)
      return false;
  }
  if (!program.groups.empty()) return true;
  const auto [known, is_new] = choices.try_emplace(shape, false);
  if (is_new) known->second = codegen::tiled_product_is_faster(shape);
  return known->second;
}

}  // namespace

Matched fast_products(Program& program) {
  Matched matched;
  Choices choices;
  std::vector<Node> kept;
  for (auto& node : program.nodes) {
    const auto product = product_of(node);
    if (!product || !use_tiles(program, *product, choices)) {
      kept.push_back(std::move(node));
      continue;
    }
    kept.push_back(allocation_of(program, product->out));
    ValueList ins = {product->a, product->b};
    if (product->bias != kNone) ins.push_back(product->bias);
    kept.push_back(
        {find_op("tessera.cpu_kernel"),
         {ValueList{product->out}, std::move(ins), c10::IValue(std::vector<double>()), c10::IValue("matmul")},
         {},
         node.module});
    matched.times++;
  }
  program.nodes = std::move(kept);
  return matched;
}

}  // namespace tessera::compiler
