#include "tessera/base/error.h"
#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

// Convolution and pooling. The batch can be sharded. Channels can be sharded: in pooling as they are, and in an
// ungrouped convolution as in a matrix product. Spatial dims cannot be sharded, because neighbours are combined. ATen's
// kernels throw for a local tensor without channels, or give wrong sizes; tessera::*_local and *_or_zeros do not.
namespace tessera::rules {
namespace {

bool either_channels_last(const TensorArg& a, const TensorArg& b) {
  auto channels_last_only = [](const TensorArg& t) {
    return is_channels_last(t.sizes, t.strides) && !is_contiguous(t.sizes, t.strides);
  };
  return channels_last_only(a) || channels_last_only(b);
}

// Element i of a list that has one value for all spatial dims, or one value for each.
int64_t at(const std::vector<int64_t>& values, size_t i) { return values.size() == 1 ? values[0] : values.at(i); }

// convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
//   input (N, C, ...)   weight (O, C / groups, ...), transposed (C, O / groups, ...)   output (N, O, ...)
Rule convolution(const OpQuery& query) {
  const auto &input = query.tensor(0), &weight = query.tensor(1);
  auto stride = query.ints_at(3), padding = query.ints_at(4), dilation = query.ints_at(5),
       output_padding = query.ints_at(7);
  bool transposed = query.bool_at(6);
  int64_t groups = query.int_at(8);
  TESSERA_CHECK(input.sizes.size() == weight.sizes.size() && input.sizes.size() >= 3, UsageError,
                query.schema.operator_name(), ": an input of sizes ", input.sizes, " and a weight of sizes ",
                weight.sizes, "; they must have the same number of dims, at least 3");
  for (size_t i = 0; i + 2 < input.sizes.size(); i++)
    TESSERA_CHECK(at(stride, i) > 0 && at(dilation, i) > 0 && at(padding, i) >= 0, UsageError,
                  query.schema.operator_name(), ": stride ", stride, ", dilation ", dilation, " and padding ", padding,
                  "; stride and dilation must be positive, padding must not be negative");
  Sizes sizes = {input.sizes[0], transposed ? weight.sizes[1] * groups : weight.sizes[0]};
  for (size_t i = 0; i + 2 < input.sizes.size(); i++) {
    int64_t in = input.sizes[i + 2], reach = at(dilation, i) * (weight.sizes[i + 2] - 1);
    sizes.push_back(transposed ? (in - 1) * at(stride, i) - 2 * at(padding, i) + reach + at(output_padding, i) + 1
                               : (in + 2 * at(padding, i) - reach - 1) / at(stride, i) + 1);
  }
  Rule rule;
  rule.outs = {{sizes, either_channels_last(input, weight) ? channels_last(sizes) : Sizes{}}};
  rule.flops = static_cast<double>(numel_of(transposed ? input.sizes : sizes)) *
               static_cast<double>(numel_of(weight.sizes)) / static_cast<double>(weight.sizes[0]);
  set_special_with_out_sizes(rule, "tessera::convolution_local");
  add_replicated_strategy(rule, query);
  StrategyBuilder(rule, query).in(0, S(0)).out(0, S(0));
  if (groups == 1) {
    int64_t in_dim = transposed ? 0 : 1, out_dim = 1 - in_dim;  // of the weight
    StrategyBuilder(rule, query).in(1, S(out_dim)).in(2, S(0)).out(0, S(1)).special();
    StrategyBuilder(rule, query).in(0, S(1)).in(1, S(in_dim)).in(2, Psum).out(0, Psum).special();
  }
  return rule;
}

// convolution_backward(grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
// mask)
Rule convolution_backward(const OpQuery& query) {
  const auto &grad = query.tensor(0), &input = query.tensor(1), &weight = query.tensor(2);
  bool transposed = query.bool_at(7);
  int64_t groups = query.int_at(9);
  auto mask = query.args[10].toBoolList();
  bool last = either_channels_last(input, weight);
  Rule rule;
  rule.outs = {{Sizes(input.sizes), last ? channels_last(input.sizes) : Sizes{}},
               {Sizes(weight.sizes), last ? channels_last(weight.sizes) : Sizes{}},
               contiguous_out(grad.sizes.slice(1, 1))};
  rule.flops = 2.0 * static_cast<double>(numel_of(transposed ? input.sizes : grad.sizes)) *
               static_cast<double>(numel_of(weight.sizes)) / static_cast<double>(weight.sizes[0]);
  rule.special = "tessera::convolution_backward_local";
  if (!query.is_none(3) && mask[2]) rule.fixes = {{.arg = 3, .what = ArgFix::What::OutSizes, .tensor = 2}};
  add_replicated_strategy(rule, query);
  StrategyBuilder(rule, query).in(0, S(0)).in(1, S(0)).out(0, S(0)).out(1, Psum).out(2, Psum);
  if (groups == 1) {
    int64_t in_dim = transposed ? 0 : 1, out_dim = 1 - in_dim;
    StrategyBuilder(rule, query).in(0, S(1)).in(2, S(out_dim)).out(0, Psum).out(1, S(out_dim)).out(2, S(0)).special();
    StrategyBuilder(rule, query).in(1, S(1)).in(2, S(in_dim)).out(0, S(1)).out(1, S(in_dim)).special();
  }
  drop_masked_outputs(rule, mask);
  return rule;
}

// Pooling keeps the leading dims: (N, C, ...) or (C, ...). All tensors of the call are sharded together.
Rule pooled(const OpQuery& query, Sizes out_sizes, const std::string& special) {
  const auto& like = query.tensors[0];
  Rule rule;
  bool last = is_channels_last(like.sizes, like.strides) && !is_contiguous(like.sizes, like.strides);
  auto outs = static_cast<size_t>(fresh_outputs(query.schema));
  rule.outs.assign(outs, {out_sizes, last && out_sizes.size() == 4 ? channels_last(out_sizes) : Sizes{}});
  set_special_with_out_sizes(rule, special);
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d + 2 < static_cast<int64_t>(like.sizes.size()); d++) {
    add_uniform_strategy(rule, query, S(d));
    bool is_batch = like.sizes.size() == 4 && d == 0;
    rule.strategies.back().special = !is_batch;
  }
  return rule;
}

// The sizes of an image with at least a channel and two spatial dims.
Sizes image_sizes(const OpQuery& query) {
  const auto sizes = query.tensor(0).sizes;
  TESSERA_CHECK(sizes.size() >= 3, UsageError, query.schema.operator_name(), ": an image of sizes ", sizes,
                "; it needs (C, H, W) or (N, C, H, W)");
  return Sizes(sizes);
}

Sizes pooled_sizes(const OpQuery& query, int dilation_arg, int ceil_arg) {
  auto kernel = query.ints_at(1), stride = query.ints_at(2), padding = query.ints_at(3);
  auto dilation = dilation_arg < 0 ? std::vector<int64_t>{1} : query.ints_at(dilation_arg);
  if (stride.empty()) stride = kernel;
  Sizes sizes = image_sizes(query);
  for (size_t i = 0; i < 2; i++) {
    auto& size = sizes[sizes.size() - 2 + i];
    size = pooled_size(size, at(kernel, i), at(padding, i), at(stride, i), at(dilation, i), query.bool_at(ceil_arg));
  }
  return sizes;
}

Rule max_pool(const OpQuery& query) {
  return pooled(query, pooled_sizes(query, 4, 5), "tessera::max_pool2d_with_indices_or_zeros");
}

Rule avg_pool(const OpQuery& query) {
  Rule rule = pooled(query, pooled_sizes(query, -1, 4), "tessera::avg_pool2d_or_zeros");
  add_linear_strategies(rule, query, 0);
  return rule;
}

Rule adaptive_pool(const OpQuery& query) {
  Sizes sizes = image_sizes(query);
  auto asked = query.ints_at(1);
  for (size_t i = 0; i < 2; i++) sizes[sizes.size() - 2 + i] = at(asked, i);
  Rule rule = pooled(query, sizes, "tessera::_adaptive_avg_pool2d_or_zeros");
  add_linear_strategies(rule, query, 0);
  return rule;
}

// Backward of pooling. Arguments are grad_output, then self; the result has the sizes of self. Linear in the gradient.
Rule pool_backward(const OpQuery& query, const std::string& special) {
  Rule rule = pooled(query, Sizes(query.tensor(1).sizes), special);
  const auto& self = query.tensor(1);
  bool last = is_channels_last(self.sizes, self.strides) && !is_contiguous(self.sizes, self.strides);
  rule.outs[0].strides = last ? channels_last(self.sizes) : Sizes{};
  add_linear_strategies(rule, query, 0);
  return rule;
}

}  // namespace

void register_convolution(Registry& to) {
  Family family(to, "convolution");
  family.op("convolution", convolution);
  family.op("convolution_backward", convolution_backward);
  family.op("max_pool2d_with_indices", max_pool);
  family.op("avg_pool2d", avg_pool);
  family.op("_adaptive_avg_pool2d", adaptive_pool);
  for (const std::string op :
       {"max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"})
    family.op(op, [special = "tessera::" + op + "_or_zeros"](const OpQuery& q) { return pool_backward(q, special); });
}

}  // namespace tessera::rules
