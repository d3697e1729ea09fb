#include "tests/rules/family_test.h"

#include <ATen/ops/adaptive_max_pool2d.h>
#include <ATen/ops/adaptive_max_pool3d.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/fractional_max_pool2d.h>
#include <ATen/ops/fractional_max_pool3d.h>
#include <ATen/ops/geqrf.h>
#include <ATen/ops/linalg_ldl_factor_ex.h>
#include <ATen/ops/linalg_lu_factor_ex.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d_with_indices.h>

namespace tessera::testing {
namespace {

c10::IValue int_list(std::vector<int64_t> v) { return c10::IValue(std::move(v)); }

// Symmetric, positive definite matrices with distinct eigenvalues.
at::Tensor positive(std::vector<int64_t> batch, int64_t n) {
  auto sizes = batch;
  sizes.insert(sizes.end(), {n, n});
  auto a = numbers(sizes);
  return a.matmul(a.transpose(-1, -2)).add(at::eye(n, at::kDouble));
}

std::vector<Sample> linalg_samples() {
  auto a = positive({5, 2}, 3), one = positive({}, 3), b = numbers({5, 2, 3, 4}), tall = numbers({5, 4, 3});
  auto [lu, pivots, lu_info] = at::linalg_lu_factor_ex(a);
  auto [ld, ld_pivots, ld_info] = at::linalg_ldl_factor_ex(a);
  auto [reflectors, tau] = at::geqrf(tall);
  auto upper = a.triu();
  std::vector<Sample> samples = {
      {"aten::_linalg_det", {a}, {}},
      {"aten::_linalg_slogdet", {a}, {}},
      {"aten::_linalg_eigh", {a, "L", true}, {}},
      {"aten::_linalg_eigh", {a, "L", false}, {}},
      {"aten::_linalg_solve_ex", {a, b}, {}},
      {"aten::_linalg_solve_ex", {one, numbers({3, 4})}, {}},
      {"aten::_linalg_solve_ex", {one, numbers({3})}, {}},
      {"aten::_linalg_solve_ex", {a, numbers({5, 2, 3})}, {}},
      {"aten::_linalg_svd", {tall, false, true}, {}},
      {"aten::_linalg_svd", {tall, false, false}, {}},
      {"aten::cholesky", {a}, {}},
      {"aten::cholesky_inverse", {a}, {}},
      {"aten::_cholesky_solve_helper", {b, a, false}, {}},
      {"aten::linalg_cholesky_ex", {a}, {}},
      {"aten::linalg_eig", {a}, {}},
      {"aten::_linalg_eigvals", {a}, {}},
      {"aten::geqrf", {tall}, {}},
      {"aten::linalg_householder_product", {reflectors, tau}, {}},
      {"aten::linalg_inv_ex", {a}, {}},
      {"aten::linalg_ldl_factor_ex", {a}, {}},
      {"aten::linalg_ldl_solve", {ld, ld_pivots, b}, {}},
      {"aten::linalg_lu", {a}, {}},
      {"aten::linalg_lu_factor_ex", {a}, {}},
      {"aten::linalg_lu_solve", {lu, pivots, b}, {}},
      {"aten::linalg_matrix_exp", {a}, {}},
      {"aten::linalg_qr", {tall}, {}},
      {"aten::linalg_qr", {tall, "r"}, {}},
      {"aten::linalg_solve_triangular", {upper, b, true}, {}},
      {"aten::linalg_solve_triangular", {upper.select(0, 0), b, true}, {}},
      {"aten::lu_unpack", {lu, pivots}, {}},
      {"aten::ormqr", {reflectors, tau, numbers({5, 4, 2})}, {}},
      {"aten::triangular_solve", {b, upper}, {}},
      {"aten::_cdist_forward", {numbers({5, 4, 3}), numbers({5, 2, 3}), 2.0, c10::IValue()}, {}},
      {"aten::_cdist_forward", {numbers({5, 4, 3}), numbers({2, 3}), 1.0, c10::IValue()}, {}},
      {"aten::_cdist_backward",
       {numbers({5, 4, 2}), numbers({1, 4, 3}), numbers({5, 2, 3}), 2.0, numbers({5, 4, 2})},
       {}},
      {"aten::_cdist_backward",
       {numbers({5, 4, 2}), numbers({5, 4, 3}), numbers({5, 2, 3}), 2.0, numbers({5, 4, 2})},
       {}},
  };
  return samples;
}

std::vector<Sample> image_samples() {
  auto line = numbers({5, 2, 6}), image = numbers({5, 2, 6, 4}), volume = numbers({5, 2, 4, 6, 4});
  c10::IValue none;
  std::vector<Sample> samples;
  const struct {
    const char* op;
    at::Tensor in;
    std::vector<int64_t> size;
    bool align;  // has the argument align_corners
  } resizes[] = {
      {"upsample_nearest1d", line, {9}, false},
      {"_upsample_nearest_exact1d", line, {9}, false},
      {"upsample_linear1d", line, {9}, true},
      {"upsample_nearest2d", image, {3, 7}, false},
      {"_upsample_nearest_exact2d", image, {3, 7}, false},
      {"upsample_bilinear2d", image, {3, 7}, true},
      {"upsample_bicubic2d", image, {3, 7}, true},
      {"_upsample_bilinear2d_aa", image, {3, 7}, true},
      {"_upsample_bicubic2d_aa", image, {3, 7}, true},
      {"_upsample_lanczos2d_aa", image, {3, 7}, true},
      {"upsample_nearest3d", volume, {3, 7, 2}, false},
      {"_upsample_nearest_exact3d", volume, {3, 7, 2}, false},
      {"upsample_trilinear3d", volume, {3, 7, 2}, true},
  };
  for (const auto& r : resizes) {
    const auto op = std::string("aten::") + r.op;
    if (rules::registry().find(op) == nullptr) continue;
    std::vector<c10::IValue> args = {r.in, r.size};
    if (r.align) args.emplace_back(false);
    samples.push_back({op, args, {}});
    auto grad_sizes = r.in.sizes().vec();
    std::copy(r.size.begin(), r.size.end(), grad_sizes.end() - static_cast<int64_t>(r.size.size()));
    args = {numbers(grad_sizes), r.size, r.in.sizes().vec()};
    if (r.align) args.emplace_back(false);
    samples.push_back({op + "_backward", args, {}});
  }
  for (const std::string kind : {"reflection", "replication"}) {
    const auto pad = "aten::" + kind + "_pad";
    samples.insert(samples.end(),
                   {
                       {pad + "1d", {line, int_list({1, 2})}, {}},
                       {pad + "1d_backward", {numbers({5, 2, 9}), line, int_list({1, 2})}, {}},
                       {pad + "2d", {image, int_list({1, 2, 3, 0})}, {}},
                       {pad + "2d_backward", {numbers({5, 2, 9, 7}), image, int_list({1, 2, 3, 0})}, {}},
                       {pad + "3d", {volume, int_list({1, 0, 2, 1, 0, 1})}, {}},
                       {pad + "3d_backward", {numbers({5, 2, 5, 9, 5}), volume, int_list({1, 0, 2, 1, 0, 1})}, {}},
                   });
  }
  auto [flat, flat_at] = at::adaptive_max_pool2d(image, {3, 2});
  auto [deep, deep_at] = at::adaptive_max_pool3d(volume, {2, 3, 2});
  auto [pooled2, at2] = at::max_pool2d_with_indices(image, {2, 2});
  auto [pooled3, at3] = at::max_pool3d_with_indices(volume, {2, 2, 2});
  auto random2 = numbers({5, 2, 2}), random3 = numbers({5, 2, 3});
  auto [some2, some2_at] = at::fractional_max_pool2d(image, {2, 2}, {3, 2}, random2);
  auto [some3, some3_at] = at::fractional_max_pool3d(volume, {2, 2, 2}, {2, 3, 2}, random3);
  const auto two = int_list({2, 2, 2}), one = int_list({1, 1, 1}), zero = int_list({0, 0, 0});
  auto grid = numbers({5, 3, 2, 2}), grid3 = numbers({5, 3, 2, 2, 3});
  samples.insert(
      samples.end(),
      {
          {"aten::adaptive_max_pool2d", {image, int_list({3, 2})}, {}},
          {"aten::adaptive_max_pool3d", {volume, int_list({2, 3, 2})}, {}},
          {"aten::adaptive_max_pool2d_backward", {numbers({5, 2, 3, 2}), image, flat_at}, {}},
          {"aten::adaptive_max_pool3d_backward", {numbers({5, 2, 2, 3, 2}), volume, deep_at}, {}},
          {"aten::_adaptive_avg_pool3d", {volume, int_list({2, 3, 2})}, {}},
          {"aten::_adaptive_avg_pool3d_backward", {numbers({5, 2, 2, 3, 2}), volume}, {}},
          {"aten::avg_pool3d", {volume, two}, {}},
          {"aten::avg_pool3d_backward", {numbers({5, 2, 2, 3, 2}), volume, two, two, zero, false, true, none}, {}},
          {"aten::max_pool3d_with_indices", {volume, two}, {}},
          {"aten::max_pool3d_with_indices_backward",
           {numbers({5, 2, 2, 3, 2}), volume, two, two, zero, one, false, at3},
           {}},
          {"aten::max_unpool2d", {pooled2, at2, int_list({6, 4})}, {}},
          {"aten::max_unpool3d", {pooled3, at3, int_list({4, 6, 4}), two, zero}, {}},
          {"aten::fractional_max_pool2d", {image, int_list({2, 2}), int_list({3, 2}), random2}, {}},
          {"aten::fractional_max_pool3d", {volume, two, int_list({2, 3, 2}), random3}, {}},
          {"aten::fractional_max_pool2d_backward",
           {numbers({5, 2, 3, 2}), image, int_list({2, 2}), int_list({3, 2}), some2_at},
           {}},
          {"aten::fractional_max_pool3d_backward",
           {numbers({5, 2, 2, 3, 2}), volume, two, int_list({2, 3, 2}), some3_at},
           {}},
          {"aten::grid_sampler_2d", {image, grid, 0, 0, false}, {}},
          {"aten::grid_sampler_3d", {volume, grid3, 0, 0, false}, {}},
          {"aten::grid_sampler_2d_backward",
           {numbers({5, 2, 3, 2}), image, grid, 0, 0, false, bools({true, true})},
           {}},
          {"aten::grid_sampler_3d_backward",
           {numbers({5, 2, 3, 2, 2}), volume, grid3, 0, 0, false, bools({true, true})},
           {}},
          {"aten::pixel_shuffle", {numbers({5, 4, 3, 2}), 2}, {}},
          {"aten::pixel_unshuffle", {image, 2}, {}},
          {"aten::channel_shuffle", {numbers({5, 4, 3, 2}), 2}, {}},
          {"aten::im2col", {image, int_list({2, 3}), int_list({1, 1}), int_list({1, 0}), int_list({2, 1})}, {}},
          {"aten::col2im",
           {numbers({5, 8, 15}), int_list({6, 4}), int_list({2, 2}), int_list({1, 1}), int_list({0, 0}),
            int_list({1, 1})},
           {}},
      });
  return samples;
}

TEST(BatchRules, HoldByBruteForce) {
  auto samples = linalg_samples();
  for (auto& sample : image_samples()) samples.push_back(std::move(sample));
  auto signal = numbers({5, 6, 3});
  auto spectrum = at::complex(signal, signal.mul(0.5));
  samples.insert(samples.end(), {
                                    {"aten::_fft_c2c", {spectrum, int_list({1}), 0, true}, {}},
                                    {"aten::_fft_c2c", {spectrum.transpose(0, 1), int_list({0, 2}), 1, false}, {}},
                                    {"aten::_fft_r2c", {signal, int_list({1}), 0, true}, {}},
                                    {"aten::_fft_r2c", {signal, int_list({0, 1}), 0, false}, {}},
                                    {"aten::_fft_c2r", {spectrum, int_list({1}), 0, 10}, {}},
                                });
  expect_family_holds("batch", samples);
}

}  // namespace
}  // namespace tessera::testing
