#include "tessera/base/error.h"
#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"

#include <algorithm>
#include <string>

// Sums of products, written as an einsum. Each letter gives one strategy: shard the letter in every operand that has
// it. If the result does not have the letter, the result is partial.
//
//   mk,kn->mn     m: S(0), R    -> S(0)
//                 n: R,    S(1) -> S(1)
//                 k: S(1), S(0) -> P(sum)
//
// A partial operand is reduced first, once for all products that use it. Only a product with fewer elements than the
// operand keeps the partial, because to reduce the product moves fewer bytes.
namespace tessera::rules {
namespace {

struct Einsum {
  std::string lhs, rhs, out;
};

Einsum parse(const std::string& text) {
  auto comma = text.find(','), arrow = text.find("->");
  return {text.substr(0, comma), text.substr(comma + 1, arrow - comma - 1), text.substr(arrow + 2)};
}

Placement shard_of(const std::string& letters, char letter, Placement otherwise) {
  auto at = letters.find(letter);
  return at == std::string::npos ? otherwise : S(static_cast<int64_t>(at));
}

// The size of a letter. Throws if the operands have different sizes, as the op does for plain tensors.
int64_t size_of(const Einsum& e, char letter, const TensorArg& lhs, const TensorArg& rhs, const OpQuery& query) {
  auto in_lhs = e.lhs.find(letter), in_rhs = e.rhs.find(letter);
  if (in_lhs != std::string::npos && in_rhs != std::string::npos)
    TESSERA_CHECK(lhs.sizes[in_lhs] == rhs.sizes[in_rhs], UsageError, query.schema.operator_name(), ": sizes ",
                  lhs.sizes, " and ", rhs.sizes, " do not match: dim ", in_lhs, " of the first and dim ", in_rhs,
                  " of the second must be equal");
  return in_lhs != std::string::npos ? lhs.sizes[in_lhs] : rhs.sizes[in_rhs];
}

// Strategies for a partial operand, if the result is smaller. A bias is partial, too.
void keep_partial_operands(Rule& rule, const OpQuery& query, std::initializer_list<int> operands, int added = -1) {
  if (rule.outs.empty()) return;
  for (int arg : operands) {
    if (numel_of(rule.outs[0].sizes) >= numel_of(query.tensor(arg).sizes)) continue;
    StrategyBuilder strategy(rule, query);
    strategy.in(arg, Psum).out(0, Psum);
    if (added >= 0 && query.find_tensor(added)) strategy.in(added, Psum);
  }
}

// lhs_arg, rhs_arg and `added` are arguments of the schema. `added` is a bias that is broadcast to the output, or -1.
Rule einsum(const OpQuery& query, const std::string& text, int lhs_arg, int rhs_arg, int added = -1) {
  Einsum e = parse(text);
  const auto& lhs = query.tensor(lhs_arg);
  const auto& rhs = query.tensor(rhs_arg);
  TESSERA_CHECK(lhs.sizes.size() == e.lhs.size() && rhs.sizes.size() == e.rhs.size(), UsageError,
                query.schema.operator_name(), ": ", text, " of tensors with ", lhs.sizes.size(), " and ",
                rhs.sizes.size(), " dims");
  std::string letters = e.out;  // batch and free letters in the order of the output, then the summed ones
  for (char letter : e.lhs + e.rhs)
    if (letters.find(letter) == std::string::npos) letters += letter;

  Rule rule;
  Sizes sizes;
  for (char letter : e.out) sizes.push_back(size_of(e, letter, lhs, rhs, query));
  const auto* bias = added < 0 ? nullptr : query.find_tensor(added);
  if (fresh_outputs(query.schema) > 0)
    rule.outs = {contiguous_out(sizes)};
  else if (bias)
    TESSERA_CHECK(bias->sizes == c10::IntArrayRef(sizes), UsageError, query.schema.operator_name(),
                  ": the tensor that it writes has sizes ", bias->sizes, ", the result ", c10::IntArrayRef(sizes),
                  "; use the op that returns a new tensor");
  rule.flops = 1;
  for (char letter : letters) rule.flops *= static_cast<double>(size_of(e, letter, lhs, rhs, query));

  add_replicated_strategy(rule, query);
  // ATen's addmv gives a result of one element for an empty local matrix and a bias of one element.
  const bool is_addmv = bias && e.rhs.size() == 1;
  if (is_addmv && numel_of(bias->sizes) == 1 && sizes[0] != 1) return rule;
  for (char letter : letters) {
    StrategyBuilder strategy(rule, query);
    strategy.in(lhs_arg, shard_of(e.lhs, letter, R)).in(rhs_arg, shard_of(e.rhs, letter, R));
    auto out = shard_of(e.out, letter, Psum);
    // If the output is P(sum), the bias must be P(sum) too. R becomes P(sum) by a division by the number of ranks.
    if (bias) strategy.in(added, out.is_sharded() ? broadcast_shard(*bias, sizes, out.dim) : out);
    if (!rule.outs.empty()) strategy.out(0, out);
  }
  keep_partial_operands(rule, query, {lhs_arg, rhs_arg}, added);
  return rule;
}

struct EinsumRow {
  const char* op;
  const char* text;
  int lhs, rhs, added;  // arguments
};

constexpr EinsumRow kEinsum[] = {
    {"mm", "mk,kn->mn", 0, 1, -1},
    {"mm.dtype", "mk,kn->mn", 0, 1, -1},
    {"bmm", "bmk,bkn->bmn", 0, 1, -1},
    {"bmm.dtype", "bmk,bkn->bmn", 0, 1, -1},
    {"mv", "mk,k->m", 0, 1, -1},
    {"dot", "k,k->", 0, 1, -1},
    {"vdot", "k,k->", 0, 1, -1},
    {"addmm", "mk,kn->mn", 1, 2, 0},
    {"addmm_", "mk,kn->mn", 1, 2, 0},
    {"addmm.dtype", "mk,kn->mn", 1, 2, 0},
    {"addmv", "mk,k->m", 1, 2, 0},
    {"addmv_", "mk,k->m", 1, 2, 0},
    {"addr", "m,n->mn", 1, 2, 0},
    {"addr_", "m,n->mn", 1, 2, 0},
    {"baddbmm", "bmk,bkn->bmn", 1, 2, 0},
    {"baddbmm_", "bmk,bkn->bmn", 1, 2, 0},
    {"baddbmm.dtype", "bmk,bkn->bmn", 1, 2, 0},
    {"addbmm", "bmk,bkn->mn", 1, 2, 0},
    {"addbmm_", "bmk,bkn->mn", 1, 2, 0},
};

// A letter for each leading dim: "ABk" for a tensor of three dims whose last is k.
std::string batch_letters(size_t count, char first = 'A') {
  std::string letters;
  for (size_t i = 0; i < count; i++) letters += static_cast<char>(first + i);
  return letters;
}

// linear(input, weight, bias). The batch has any number of dims, and each can be sharded. ATen's composite kernel folds
// them into one dim, so it cannot keep the sharding of the second.
Rule linear(const OpQuery& query) {
  TESSERA_CHECK(!query.tensor(0).sizes.empty(), UsageError, "aten::linear: the input has no dims");
  auto batch = batch_letters(query.tensor(0).sizes.size() - 1);
  if (query.tensor(1).sizes.size() == 1) return einsum(query, batch + "k,k->" + batch, 0, 1, 2);
  return einsum(query, batch + "k,nk->" + batch + "n", 0, 1, 2);
}

// linear_backward(input, grad_output, weight, output_mask): three products over the same letters.
//   input "Ak", grad "An", weight "nk":   grad_input "An,nk->Ak"   grad_weight "An,Ak->nk"   grad_bias "An->n"
Rule linear_backward(const OpQuery& query) {
  const auto &input = query.tensor(0), &grad = query.tensor(1), &weight = query.tensor(2);
  TESSERA_CHECK(!input.sizes.empty() && grad.sizes.size() == input.sizes.size() && weight.sizes.size() == 2, UsageError,
                "linear_backward takes an input and a gradient of as many dims, and a weight of 2 dims; found sizes ",
                input.sizes, ", ", grad.sizes, " and ", weight.sizes);
  auto batch = batch_letters(input.sizes.size() - 1);
  const std::string of_input = batch + "k", of_grad = batch + "n", of_weight = "nk";
  auto mask = query.args[3].toBoolList();
  const std::string out_letters[] = {of_input, of_weight, "n"};
  Rule rule;
  rule.outs = {contiguous_out(input.sizes), contiguous_out(weight.sizes), contiguous_out(weight.sizes.slice(0, 1))};
  for (size_t i = 0; i < 3; i++)
    if (!mask[i]) rule.outs[i] = {};
  rule.flops = 2.0 * static_cast<double>(numel_of(input.sizes)) * static_cast<double>(weight.sizes[0]);
  rule.special = "tessera::linear_backward";  // ATen has the schema but no kernel for CPU or CUDA
  StrategyBuilder(rule, query).special();
  for (char letter : batch + "nk") {
    StrategyBuilder strategy(rule, query);
    strategy.in(0, shard_of(of_input, letter, R))
        .in(1, shard_of(of_grad, letter, R))
        .in(2, shard_of(of_weight, letter, R))
        .special();
    const std::string operands[] = {of_grad + of_weight, of_grad + of_input, of_grad};
    for (size_t i = 0; i < 3; i++) {
      // No operand of grad_bias has k, so grad_bias is R then.
      bool appears = operands[i].find(letter) != std::string::npos;
      if (mask[i]) strategy.out(i, appears ? shard_of(out_letters[i], letter, Psum) : R);
    }
  }
  (void)grad;
  return rule;
}

// matmul of vectors, matrices and broadcast batches.
Rule matmul(const OpQuery& query) {
  auto lhs = query.tensor(0).sizes, rhs = query.tensor(1).sizes;
  TESSERA_CHECK(!lhs.empty() && !rhs.empty(), UsageError, "aten::matmul: an operand has no dims; write a * b instead");
  size_t lhs_batch = lhs.size() > 2 ? lhs.size() - 2 : 0, rhs_batch = rhs.size() > 2 ? rhs.size() - 2 : 0;
  size_t batch = std::max(lhs_batch, rhs_batch);
  auto shared = batch_letters(batch);
  // A batch dim of size 1 that is broadcast has the letter '1', which the output does not have. So no strategy shards
  // it.
  std::string lhs_letters = shared.substr(batch - lhs_batch), rhs_letters = shared.substr(batch - rhs_batch);
  Sizes sizes;
  for (size_t i = 0; i < batch; i++) {
    int64_t in_lhs = i + lhs_batch < batch ? 1 : lhs[i + lhs_batch - batch];
    int64_t in_rhs = i + rhs_batch < batch ? 1 : rhs[i + rhs_batch - batch];
    TESSERA_CHECK(in_lhs == in_rhs || in_lhs == 1 || in_rhs == 1, UsageError, "aten::matmul: batch sizes of ", lhs,
                  " and ", rhs, " do not broadcast");
    if (in_lhs == 1 && in_rhs != 1 && i + lhs_batch >= batch) lhs_letters[i + lhs_batch - batch] = '1';
    if (in_rhs == 1 && in_lhs != 1 && i + rhs_batch >= batch) rhs_letters[i + rhs_batch - batch] = '1';
    sizes.push_back(std::max(in_lhs, in_rhs) * (in_lhs && in_rhs ? 1 : 0));
  }
  lhs_letters += lhs.size() > 1 ? "mk" : "k";
  rhs_letters += rhs.size() > 1 ? "kn" : "k";
  std::string out_letters = shared;
  if (lhs.size() > 1) {
    out_letters += 'm';
    sizes.push_back(lhs[lhs.size() - 2]);
  }
  if (rhs.size() > 1) {
    out_letters += 'n';
    sizes.push_back(rhs.back());
  }
  TESSERA_CHECK(lhs.back() == rhs[rhs.size() > 1 ? rhs.size() - 2 : 0], UsageError, "aten::matmul: the last dim of ",
                lhs, " and the last but one of ", rhs, " must be equal");
  Rule rule;
  rule.outs = {contiguous_out(sizes)};
  rule.flops = static_cast<double>(numel_of(sizes)) * static_cast<double>(lhs.back());
  add_replicated_strategy(rule, query);
  for (char letter : out_letters + "k")
    StrategyBuilder(rule, query)
        .in(0, shard_of(lhs_letters, letter, R))
        .in(1, shard_of(rhs_letters, letter, R))
        .out(0, shard_of(out_letters, letter, Psum));
  keep_partial_operands(rule, query, {0, 1});
  return rule;
}

// _scaled_mm(self (M, K), mat2 (K, N), scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum). A scale is one
// value per tensor, or one per row of self (M, 1) and column of mat2 (1, N). Scales of blocks along K are replicated
// with everything else.
Rule scaled_mm(const OpQuery& query) {
  const auto self = query.tensor(0).sizes, mat2 = query.tensor(1).sizes;
  TESSERA_CHECK(self.size() == 2 && mat2.size() == 2 && self[1] == mat2[0], UsageError, "aten::_scaled_mm: sizes ",
                self, " and ", mat2, " do not match; write (M, K) and (K, N)");
  const auto& scale_a = query.tensor(2);
  const auto& scale_b = query.tensor(3);
  Rule rule;
  rule.outs = {contiguous_out({self[0], mat2[1]})};
  rule.flops = static_cast<double>(self[0]) * static_cast<double>(self[1]) * static_cast<double>(mat2[1]);
  rule.special = "tessera::_scaled_mm_local";
  add_replicated_strategy(rule, query);
  const bool one_a = numel_of(scale_a.sizes) == 1, one_b = numel_of(scale_b.sizes) == 1;
  const bool by_row = scale_a.sizes == c10::IntArrayRef({self[0], 1});
  const bool by_column = scale_b.sizes == c10::IntArrayRef({1, mat2[1]});
  if ((!one_a && !by_row) || (!one_b && !by_column)) return rule;
  StrategyBuilder(rule, query).in(0, S(0)).in(2, one_a ? R : S(0)).out(0, S(0)).special();
  StrategyBuilder(rule, query).in(1, S(1)).in(3, one_b ? R : S(1)).in(4, S(0)).out(0, S(1)).special();
  const auto dtype = query.is_none(6) ? query.tensor(0).dtype : static_cast<c10::ScalarType>(query.int_at(6));
  if (c10::elementSize(dtype) > 1)  // no sum of float8
    StrategyBuilder(rule, query).in(0, S(1)).in(1, S(0)).in(4, Psum).out(0, Psum).special();
  return rule;
}

// _grouped_mm(self, mat2, offs, bias, out_dtype). Groups are a dim, or ranges of rows that end at the values of `offs`:
//   (T, K) (G, K, N) -> (T, N)       groups of T
//   (G, M, K) (K, T) -> (M, T)       groups of T
//   (M, T) (T, N)    -> (G, M, N)    groups of T
//   (G, M, K) (G, K, N) -> (G, M, N)
// T is not sharded, because `offs` has global positions. "." stands for T and for the G that belongs to it.
Rule grouped_mm(const OpQuery& query) {
  const auto self = query.tensor(0).sizes, mat2 = query.tensor(1).sizes;
  TESSERA_CHECK((self.size() == 2 || self.size() == 3) && (mat2.size() == 2 || mat2.size() == 3), UsageError,
                "aten::_grouped_mm takes matrices or batches of them; found sizes ", self, " and ", mat2);
  const bool rows = self.size() == 2, columns = mat2.size() == 2;
  const auto* offs = query.find_tensor(2);
  TESSERA_CHECK(!(rows || columns) || offs, UsageError, "aten::_grouped_mm of sizes ", self, " and ", mat2,
                " needs offs, the end of each group");
  const Einsum e = rows && columns ? Einsum{"m.", ".n", ".mn"}
                   : rows          ? Einsum{".k", ".kn", ".n"}
                   : columns       ? Einsum{".mk", "k.", "m."}
                                   : Einsum{"gmk", "gkn", "gmn"};
  Rule rule;
  Sizes sizes;
  for (char letter : e.out)
    sizes.push_back(letter != '.'     ? size_of(e, letter, query.tensor(0), query.tensor(1), query)
                    : rows && columns ? offs->sizes[0]
                    : rows            ? self[0]
                                      : mat2[1]);
  rule.outs = {contiguous_out(sizes)};
  rule.flops = static_cast<double>(numel_of(self)) * static_cast<double>(mat2.back());
  set_special_with_out_sizes(rule, "tessera::_grouped_mm_local");
  add_replicated_strategy(rule, query);
  for (char letter : std::string("gmnk"))
    if ((e.lhs + e.rhs).find(letter) != std::string::npos)
      StrategyBuilder(rule, query)
          .in(0, shard_of(e.lhs, letter, R))
          .in(1, shard_of(e.rhs, letter, R))
          .out(0, shard_of(e.out, letter, Psum))
          .special();
  return rule;
}

}  // namespace

void register_matmul(Registry& to) {
  Family family(to, "matmul");
  for (const auto& row : kEinsum)
    family.op(row.op, [&row](const OpQuery& query) { return einsum(query, row.text, row.lhs, row.rhs, row.added); });
  family.op(
      "_foreach_mm", [](const OpQuery& query) { return einsum(query, "mk,kn->mn", 0, 1); }, ListMode::Elementwise);
  family.op("linear", linear);
  family.op("linear_backward", linear_backward);
  family.op("matmul", matmul);
  family.op("_scaled_mm", scaled_mm);
  family.op("_grouped_mm", grouped_mm);
}

}  // namespace tessera::rules
