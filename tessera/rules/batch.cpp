#include "tessera/base/error.h"
#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"
#include "tessera/rules/detail/meta_call.h"

#include <c10/core/WrapDimMinimal.h>

#include <algorithm>

// Ops that treat each entry of a batch by itself: matrix decompositions, Fourier transforms, distances, resizing,
// padding, pooling in 3-D. Batch dims can be sharded; the dims of one entry cannot.
namespace tessera::rules {
namespace {

// Global sizes of the outputs. A rule whose op LibTorch cannot run on meta tensors has a function for them.
using OutSizes = std::vector<OutInfo> (*)(const OpQuery&);

std::vector<OutInfo> dense_outs(const OpQuery& query) {
  if (query.dense_outs) return *query.dense_outs;
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(query.schema.name().c_str(), query.schema.overload_name().c_str());
  const auto outs = run_on_meta(op, query, /*other_code=*/true);
  TESSERA_CHECK(outs, InternalError, query.schema.operator_name(), ": LibTorch has no meta kernel for it");
  return *outs;
}

// The output has the sizes of tensor `arg` and is contiguous.
template <int arg>
std::vector<OutInfo> like_tensor(const OpQuery& query) {
  return {contiguous_out(query.tensor(arg).sizes)};
}

Sizes column_major(c10::IntArrayRef sizes) {  // matrices as LAPACK stores them
  auto strides = contiguous(sizes);
  const auto n = sizes.size();
  if (n >= 2) {
    strides[n - 2] = 1;
    strides[n - 1] = std::max<int64_t>(sizes[n - 2], 1);
  }
  return strides;
}

struct BatchOp {
  const char* op;
  // Number of dims of one entry, for each tensor argument and then for each output: "22>21" has matrices in, a matrix
  // and a vector out. '-': not batched, replicated.
  const char* dims;
  OutSizes sizes = dense_outs;
  int linear = -1;  // the argument of the schema in which output 0 is linear, or -1
};

int entry_dims(char letter) { return letter == '-' ? -1 : letter - '0'; }

// Batch dims broadcast together, as in matmul.
Rule batched(const OpQuery& query, const BatchOp& row) {
  const std::string dims(row.dims);
  const auto arrow = dims.find('>');
  Rule rule;
  rule.outs = row.sizes(query);
  const auto in_dims = [&](const TensorArg& t) {
    size_t position = 0;  // among the tensor arguments of the schema
    for (int a = 0; a < t.arg; a++) {
      const auto type = query.schema.arguments()[static_cast<size_t>(a)].type()->str();
      position += type == "Tensor" || type == "Tensor?";
    }
    return position < arrow ? entry_dims(dims[position]) : -1;
  };
  Sizes batch;
  for (const auto& t : query.tensors) {
    const int entry = in_dims(t);
    if (entry < 0) continue;
    TESSERA_CHECK(static_cast<int>(t.sizes.size()) >= entry, UsageError, query.schema.operator_name(), ": argument ",
                  t.arg, " has sizes ", t.sizes, "; it needs at least ", entry, " dims");
    const auto lead = t.sizes.slice(0, t.sizes.size() - static_cast<size_t>(entry));
    if (lead.size() > batch.size()) batch.insert(batch.begin(), lead.size() - batch.size(), 1);
    for (size_t d = 0; d < lead.size(); d++) {
      auto& size = batch[batch.size() - lead.size() + d];
      size = size == 1 ? lead[d] : size;
    }
  }
  add_replicated_strategy(rule, query);
  const auto ndim = static_cast<int64_t>(batch.size());
  for (int64_t d = 0; d < ndim; d++) {
    Placements in, out;
    for (const auto& t : query.tensors) {
      const int entry = in_dims(t);
      const int64_t own = d - ndim + static_cast<int64_t>(t.sizes.size()) - entry;
      in.push_back(entry >= 0 && own >= 0 && t.sizes[own] == batch[d] ? S(own) : R);
    }
    for (size_t i = 0; i < rule.outs.size(); i++) {
      const int entry = arrow + 1 + i < dims.size() ? entry_dims(dims[arrow + 1 + i]) : -1;
      const int64_t own = d - ndim + static_cast<int64_t>(rule.outs[i].sizes.size()) - entry;
      out.push_back(entry >= 0 && own >= 0 ? S(own) : R);
    }
    rule.add_strategy(std::move(in), std::move(out));
  }
  if (row.linear >= 0) add_linear_strategies(rule, query, row.linear);
  return rule;
}

// _linalg_solve_ex(A, B). B is a batch of vectors if it has one dim less than A.
Rule solve(const OpQuery& query) {
  static constexpr BatchOp kMatrices{"", "22>2210", dense_outs, 1}, kVectors{"", "21>1210", dense_outs, 1};
  const auto a = query.tensor(0).sizes, b = query.tensor(1).sizes;
  const bool vectors = b.size() == 1 || (b.size() + 1 == a.size() && b == a.slice(0, a.size() - 1));
  return batched(query, vectors ? kVectors : kMatrices);
}

// Outputs that a call leaves empty ([0]: _linalg_svd without vectors) have no batch dim: they are R.
Rule batched_with_empty_outputs(const OpQuery& query, const BatchOp& row) {
  Rule rule = batched(query, row);
  for (size_t i = 0; i < rule.outs.size(); i++)
    if (rule.outs[i].sizes == Sizes{0})
      for (auto& strategy : rule.strategies) strategy.out[i] = R;
  return rule;
}

std::vector<OutInfo> solved(const OpQuery& query, int a_arg, int b_arg) {
  // Batch dims of A and B broadcast; the result has the matrix dims of B.
  const auto a = query.tensor(a_arg).sizes, b = query.tensor(b_arg).sizes;
  const size_t ndim = std::max(a.size(), b.size());
  Sizes sizes(ndim, 1);
  for (const auto& s : {a, b})
    for (size_t d = 0; d + 2 < s.size(); d++) {
      auto& size = sizes[ndim - s.size() + d];
      if (size == 1) size = s[d];
    }
  sizes[ndim - 2] = b[b.size() - 2];
  sizes[ndim - 1] = b[b.size() - 1];
  return {{sizes, column_major(sizes)}};
}

std::vector<OutInfo> eig_outs(const OpQuery& query) {
  const auto self = query.tensor(0).sizes;
  return {contiguous_out(self.slice(0, self.size() - 1)), {Sizes(self), column_major(self)}};
}

std::vector<OutInfo> qr_factors(const OpQuery& query) {  // geqrf: a, tau
  const auto self = query.tensor(0).sizes;
  Sizes tau(self.slice(0, self.size() - 1));
  tau.back() = std::min(self[self.size() - 2], self[self.size() - 1]);
  return {{Sizes(self), column_major(self)}, contiguous_out(tau)};
}

std::vector<OutInfo> column_major_like_0(const OpQuery& query) {
  const auto self = query.tensor(0).sizes;
  return {{Sizes(self), column_major(self)}};
}

std::vector<OutInfo> distances(const OpQuery& query) {  // _cdist_forward(x1 (..., P, M), x2 (..., R, M)) -> (..., P, R)
  const auto a = query.tensor(0).sizes, b = query.tensor(1).sizes;
  Sizes sizes = solved(query, 0, 1)[0].sizes;
  sizes[sizes.size() - 2] = a[a.size() - 2];
  sizes[sizes.size() - 1] = b[b.size() - 2];
  return {contiguous_out(sizes)};
}

// _cdist_backward(grad (..., P, R), x1, ...): the gradient of x1 before its batch dims are summed to those of x1.
std::vector<OutInfo> distances_backward(const OpQuery& query) {
  const auto grad = query.tensor(0).sizes, x1 = query.tensor(1).sizes;
  TESSERA_CHECK(grad.size() >= 2 && x1.size() >= 2, UsageError, "aten::_cdist_backward of sizes ", grad, " and ", x1);
  if (numel_of(grad) == 0 || numel_of(x1) == 0) return {contiguous_out(x1)};
  Sizes sizes(grad.slice(0, grad.size() - 2));
  sizes.push_back(x1[x1.size() - 2]);
  sizes.push_back(x1[x1.size() - 1]);
  return {contiguous_out(sizes)};
}

std::vector<OutInfo> sampled(const OpQuery& query) {  // grid_sampler: input (N, C, ...), grid (N, ..., 2 or 3)
  const auto input = query.tensor(0).sizes, grid = query.tensor(1).sizes;
  Sizes sizes = {input[0], input[1]};
  for (size_t d = 1; d + 1 < grid.size(); d++) sizes.push_back(grid[d]);
  return {contiguous_out(sizes)};
}

std::vector<OutInfo> sampled_backward(const OpQuery& query) {
  return {contiguous_out(query.tensor(1).sizes), contiguous_out(query.tensor(2).sizes)};
}

Rule grid_sampler_backward(const OpQuery& query) {
  static constexpr BatchOp kRow{"", "---> ", sampled_backward};
  Rule rule = batched(query, kRow);
  StrategyBuilder(rule, query).in(0, S(0)).in(1, S(0)).in(2, S(0)).out(0, S(0)).out(1, S(0));
  const auto mask = query.args[query.schema.arguments().size() - 1].toBoolList();
  if (!mask[0]) {
    rule.outs[0] = {};
    for (auto& strategy : rule.strategies) strategy.out[0] = R;
  }
  return rule;
}

// For an empty local batch ATen's kernel gives the sizes of x1, so a batch that is broadcast is not sharded.
Rule cdist_backward(const OpQuery& query) {
  static constexpr BatchOp kRow{"", "2222>2", distances_backward};
  Rule rule = batched(query, kRow);
  const auto grad = query.tensor(0).sizes, x1 = query.tensor(1).sizes;
  if (grad.slice(0, grad.size() - 2) != x1.slice(0, x1.size() - 2)) rule.strategies.resize(1);
  return rule;
}

// Matrices. A batch of them is sharded along any leading dim.
constexpr BatchOp kLinalg[] = {
    {"_linalg_det", "2>021"},
    {"_linalg_eigh", "2>12"},
    {"_linalg_slogdet", "2>0021"},
    {"_linalg_svd", "2>212"},
    {"cholesky", "2>2", column_major_like_0},
    {"cholesky_inverse", "2>2", column_major_like_0},
    {"_cholesky_solve_helper", "22>2", column_major_like_0, 0},
    {"linalg_cholesky_ex", "2>20"},
    {"linalg_eig", "2>12", eig_outs},
    {"_linalg_eigvals", "2>1", [](const OpQuery& q) { return std::vector{eig_outs(q)[0]}; }},
    {"geqrf", "2>21", qr_factors},
    {"linalg_householder_product", "21>2", column_major_like_0},
    {"linalg_inv_ex", "2>20"},
    {"linalg_ldl_factor_ex", "2>210"},
    {"linalg_ldl_solve", "212>2", dense_outs, 2},
    {"linalg_lu", "2>222"},
    {"linalg_lu_factor_ex", "2>210"},
    {"linalg_lu_solve", "212>2", dense_outs, 2},
    {"linalg_matrix_exp", "2>2", like_tensor<0>},
    {"linalg_qr", "2>22"},
    {"linalg_solve_triangular", "22>2", [](const OpQuery& q) { return solved(q, 0, 1); }, 1},
    {"lu_unpack", "21>222"},
    {"ormqr", "212>2",
     [](const OpQuery& q) {
       return std::vector<OutInfo>{{Sizes(q.tensor(2).sizes), column_major(q.tensor(2).sizes)}};
     },
     2},
    {"triangular_solve", "22>22", dense_outs, 0},
    {"_cdist_forward", "22>2", distances},
};

// Images (N, C, ...). All but max pooling are linear in their first argument. ATen's kernels accept an empty batch, but
// not a batch without channels, so only N is sharded.
constexpr BatchOp kImages[] = {
    {"_upsample_bicubic2d_aa", "3>3", dense_outs, 0},
    {"_upsample_bilinear2d_aa", "3>3", dense_outs, 0},
    {"_upsample_lanczos2d_aa", "3>3", dense_outs, 0},
    {"_upsample_nearest_exact1d", "2>2", dense_outs, 0},
    {"_upsample_nearest_exact2d", "3>3", dense_outs, 0},
    {"_upsample_nearest_exact3d", "4>4", dense_outs, 0},
    {"upsample_bicubic2d", "3>3", dense_outs, 0},
    {"upsample_bilinear2d", "3>3", dense_outs, 0},
    {"upsample_linear1d", "2>2", dense_outs, 0},
    {"upsample_nearest1d", "2>2", dense_outs, 0},
    {"upsample_nearest2d", "3>3", dense_outs, 0},
    {"upsample_nearest3d", "4>4", dense_outs, 0},
    {"upsample_trilinear3d", "4>4", dense_outs, 0},
    {"reflection_pad1d", "2>2", dense_outs, 0},
    {"reflection_pad3d", "4>4", dense_outs, 0},
    {"replication_pad1d", "2>2", dense_outs, 0},
    {"replication_pad2d", "3>3", dense_outs, 0},
    {"replication_pad3d", "4>4", dense_outs, 0},
    {"replication_pad1d_backward", "22>2", dense_outs, 0},
    {"replication_pad2d_backward", "33>3", like_tensor<1>, 0},
    {"replication_pad3d_backward", "44>4", like_tensor<1>, 0},
    {"reflection_pad1d_backward", "22>2", dense_outs, 0},
    {"reflection_pad2d_backward", "33>3", like_tensor<1>, 0},
    {"reflection_pad3d_backward", "44>4", dense_outs, 0},
    {"adaptive_max_pool2d", "3>33"},
    {"adaptive_max_pool3d", "4>44"},
    {"adaptive_max_pool2d_backward", "333>3", dense_outs, 0},
    {"adaptive_max_pool3d_backward", "444>4", dense_outs, 0},
    {"avg_pool3d", "4>4", dense_outs, 0},
    {"avg_pool3d_backward", "44>4", dense_outs, 0},
    {"fractional_max_pool2d", "32>33"},
    {"fractional_max_pool3d", "42>44"},
    {"fractional_max_pool2d_backward", "333>3", dense_outs, 0},
    {"fractional_max_pool3d_backward", "444>4", like_tensor<1>, 0},
    {"_adaptive_avg_pool3d_backward", "44>4", like_tensor<1>, 0},
    {"max_pool3d_with_indices_backward", "444>4", like_tensor<1>, 0},
    {"grid_sampler_2d", "33>3", sampled, 0},
    {"grid_sampler_3d", "44>4", sampled, 0},
};

int64_t of_each(const std::vector<int64_t>& values, size_t i) { return values.size() == 1 ? values[0] : values.at(i); }

// upsample_*_backward(grad_output, output_size, input_size, ...): input_size has the batch size.
Rule upsample_backward(const OpQuery& query) {
  Rule rule;
  rule.outs = dense_outs(query);
  rule.fixes = {{.arg = 2, .what = ArgFix::What::OutSizes}};
  add_replicated_strategy(rule, query);
  add_uniform_strategy(rule, query, S(0));
  add_linear_strategies(rule, query, 0);
  return rule;
}

// Pooling, padding and unfolding of (N, C, ...) or (C, ...) whose output sizes LibTorch cannot give on meta tensors.
Rule image_of_sizes(const OpQuery& query, Sizes sizes, size_t spatial, bool linear = true) {
  const bool has_batch = query.tensors[0].sizes.size() > spatial + 1;
  Rule rule;
  rule.outs.assign(static_cast<size_t>(fresh_outputs(query.schema)), contiguous_out(sizes));
  add_replicated_strategy(rule, query);
  if (has_batch) add_uniform_strategy(rule, query, S(0));
  if (linear) add_linear_strategies(rule, query, 0);
  return rule;
}

Sizes with_spatial(const OpQuery& query, const std::vector<int64_t>& spatial) {
  Sizes sizes(query.tensors[0].sizes);
  TESSERA_CHECK(sizes.size() > spatial.size(), UsageError, query.schema.operator_name(), ": sizes ",
                query.tensors[0].sizes, "; it needs at least ", spatial.size() + 1, " dims");
  for (size_t i = 0; i < spatial.size(); i++) sizes[sizes.size() - spatial.size() + i] = spatial[i];
  return sizes;
}

Rule reflection_pad2d(const OpQuery& query) {
  const auto pad = query.ints_at(1);
  const auto in = query.tensor(0).sizes;
  TESSERA_CHECK(in.size() >= 3 && pad.size() == 4, UsageError, "aten::reflection_pad2d of sizes ", in, " by ", pad);
  const std::vector<int64_t> spatial = {in[in.size() - 2] + pad.at(2) + pad.at(3), in[in.size() - 1] + pad[0] + pad[1]};
  return image_of_sizes(query, with_spatial(query, spatial), 2);
}

// adaptive pooling and unpooling: the sizes are an argument.
Rule of_asked_size(const OpQuery& query, int arg, size_t spatial, bool linear = true) {
  auto asked = query.ints_at(arg);
  if (asked.size() == 1) asked.assign(spatial, asked[0]);
  return image_of_sizes(query, with_spatial(query, asked), spatial, linear);
}

Rule max_pool3d(const OpQuery& query) {
  const auto kernel = query.ints_at(1), padding = query.ints_at(3), dilation = query.ints_at(4);
  auto stride = query.ints_at(2);
  if (stride.empty()) stride = kernel;
  const auto in = query.tensor(0).sizes;
  TESSERA_CHECK(in.size() >= 4, UsageError, query.schema.operator_name(), " of sizes ", in,
                "; it needs (C, D, H, W) or (N, C, D, H, W)");
  std::vector<int64_t> spatial;
  for (size_t i = 0; i < 3; i++)
    spatial.push_back(pooled_size(in[in.size() - 3 + i], of_each(kernel, i), of_each(padding, i), of_each(stride, i),
                                  of_each(dilation, i), query.bool_at(5)));
  return image_of_sizes(query, with_spatial(query, spatial), 3, /*linear=*/false);
}

// im2col(self (N, C, H, W), kernel_size, dilation, padding, stride) -> (N, C * kernel, L): L windows.
int64_t windows(c10::IntArrayRef image, const OpQuery& query, int first_arg) {
  const auto kernel = query.ints_at(first_arg), dilation = query.ints_at(first_arg + 1),
             padding = query.ints_at(first_arg + 2), stride = query.ints_at(first_arg + 3);
  int64_t count = 1;
  for (size_t i = 0; i < 2; i++)
    count *= pooled_size(image[image.size() - 2 + i], of_each(kernel, i), of_each(padding, i), of_each(stride, i),
                         of_each(dilation, i), false);
  return count;
}

Rule im2col(const OpQuery& query) {
  const auto in = query.tensor(0).sizes;
  const auto kernel = query.ints_at(1);
  TESSERA_CHECK(in.size() >= 3, UsageError, "aten::im2col of sizes ", in, "; it needs (C, H, W) or (N, C, H, W)");
  const int64_t area = of_each(kernel, 0) * of_each(kernel, 1);
  Sizes sizes(in.slice(0, in.size() - 2));
  sizes.back() *= area;
  sizes.push_back(windows(in, query, 1));
  return image_of_sizes(query, sizes, 2);
}

Rule col2im(const OpQuery& query) {
  const auto in = query.tensor(0).sizes;
  const auto asked = query.ints_at(1), kernel = query.ints_at(2);
  const int64_t area = of_each(kernel, 0) * of_each(kernel, 1);
  TESSERA_CHECK(in.size() >= 2 && area > 0, UsageError, "aten::col2im of sizes ", query.tensor(0).sizes,
                " with a kernel of ", kernel, "; it needs (C * area, L) or (N, C * area, L)");
  Sizes sizes(in.slice(0, in.size() - 1));
  sizes.back() /= area;
  sizes.push_back(of_each(asked, 0));
  sizes.push_back(of_each(asked, 1));
  return image_of_sizes(query, sizes, 1);
}

// pixel_shuffle, pixel_unshuffle: ATen's kernels give wrong sizes for a local tensor without elements.
Rule pixels(const OpQuery& query, const std::string& special) {
  static constexpr BatchOp kRow{"", "3>3", dense_outs, 0};
  Rule rule = batched(query, kRow);
  set_special_with_out_sizes(rule, special);
  for (auto& strategy : rule.strategies) strategy.special = strategy.in[0].is_sharded();
  return rule;
}

// channel_shuffle(self, groups): only channels move.
Rule channel_shuffle(const OpQuery& query) {
  const auto& self = query.tensor(0);
  Rule rule;
  rule.outs = {contiguous_out(self.sizes)};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()); d++)
    if (d != 1) add_uniform_strategy(rule, query, S(d));
  for (auto p : kAnyPartial) add_uniform_strategy(rule, query, p);
  return rule;
}

// Fourier transforms along `dim`: other dims can be sharded. Linear. The strides of ATen's results depend on the
// device, and its kernels throw for an empty tensor: tessera::_fft_*_local gives contiguous results, or none.
Rule fourier(const OpQuery& query, Sizes sizes, const std::string& special) {
  const auto& self = query.tensor(0);
  const auto ndim = static_cast<int64_t>(self.sizes.size());
  std::vector<bool> transformed(self.sizes.size(), false);
  for (auto d : query.ints_at(1)) transformed.at(static_cast<size_t>(c10::maybe_wrap_dim(d, ndim))) = true;
  Rule rule;
  rule.outs = {contiguous_out(sizes)};
  rule.flops = 10.0 * static_cast<double>(numel_of(self.sizes));
  set_special_with_out_sizes(rule, special);
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim; d++)
    if (!transformed[static_cast<size_t>(d)]) add_uniform_strategy(rule, query, S(d));
  for (auto p : kLinearPartials) add_uniform_strategy(rule, query, p);
  for (auto& strategy : rule.strategies) strategy.special = true;
  return rule;
}

int64_t last_transformed(const OpQuery& query) {
  const auto dims = query.ints_at(1);
  TESSERA_CHECK(!dims.empty(), UsageError, query.schema.operator_name(), ": no dims to transform");
  const auto ndim = static_cast<int64_t>(query.tensor(0).sizes.size());
  return c10::maybe_wrap_dim(dims.back(), ndim, /*wrap_scalar=*/false);
}

}  // namespace

void register_batch(Registry& to) {
  Family family(to, "batch");
  for (const auto& row : kLinalg)
    family.op(row.op, [&row](const OpQuery& q) { return batched_with_empty_outputs(q, row); });
  family.op("_linalg_solve_ex", solve);
  family.op("_cdist_backward", cdist_backward);
  for (const auto& row : kImages) family.op(row.op, [&row](const OpQuery& q) { return batched(q, row); });
  for (const std::string op :
       {"_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_lanczos2d_aa", "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_bicubic2d", "upsample_bilinear2d",
        "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d"})
    family.op(op + "_backward", upsample_backward);
  for (const auto* op : {"grid_sampler_2d_backward", "grid_sampler_3d_backward"}) family.op(op, grid_sampler_backward);
  family.op("reflection_pad2d", reflection_pad2d);
  family.op("_adaptive_avg_pool3d", [](const OpQuery& q) { return of_asked_size(q, 1, 3); });
  // Of equal indices one entry is kept, and not the same one on every rank: not linear.
  family.op("max_unpool2d", [](const OpQuery& q) { return of_asked_size(q, 2, 2, /*linear=*/false); });
  family.op("max_unpool3d", [](const OpQuery& q) { return of_asked_size(q, 2, 3, /*linear=*/false); });
  family.op("max_pool3d_with_indices", max_pool3d);
  family.op("im2col", im2col);
  family.op("col2im", col2im);
  family.op("channel_shuffle", channel_shuffle);
  for (const std::string op : {"pixel_shuffle", "pixel_unshuffle"})
    family.op(op, [special = "tessera::" + op + "_or_zeros"](const OpQuery& q) { return pixels(q, special); });
  family.op("_fft_c2c",
            [](const OpQuery& q) { return fourier(q, Sizes(q.tensor(0).sizes), "tessera::_fft_c2c_local"); });
  family.op("_fft_r2c", [](const OpQuery& q) {
    Sizes sizes(q.tensor(0).sizes);
    auto& last = sizes[last_transformed(q)];
    if (q.bool_at(3)) last = last / 2 + 1;
    return fourier(q, sizes, "tessera::_fft_r2c_local");
  });
  family.op("_fft_c2r", [](const OpQuery& q) {
    Sizes sizes(q.tensor(0).sizes);
    sizes[last_transformed(q)] = q.int_at(3);
    return fourier(q, sizes, "tessera::_fft_c2r_local");
  });
}

}  // namespace tessera::rules
