// Rules of ops that have kernels for CUDA alone. The ranks are simulated on one GPU.
#include "tests/rules/family_test.h"

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

namespace tessera::testing {
namespace {

at::Tensor on_gpu(const at::Tensor& t, at::ScalarType dtype = at::kHalf) { return t.to(at::kCUDA, dtype); }

std::vector<at::Tensor> results_of(const Sample& sample) {
  const OpCall call(sample);
  return call.run(call.tensors());
}

// Forward and backward of the three kernels of attention. With three and four ranks, some have no heads.
std::vector<Sample> attention_samples() {
  const auto q = on_gpu(numbers({3, 2, 64, 32})), k = on_gpu(numbers({3, 2, 64, 32}).mul(0.7)),
             v = on_gpu(numbers({3, 2, 64, 32}).mul(0.4)),
             bias = on_gpu(numbers({3, 1, 64, 64})).expand({3, 2, 64, 64});
  const c10::IValue none;
  const std::string name = "aten::_scaled_dot_product_";
  std::vector<Sample> samples;
  for (const bool causal : {false, true}) {
    const Sample flash{name + "flash_attention", {q, k, v, 0.0, causal}, {}, {4, 5, 6}};
    const auto f = results_of(flash);
    samples.push_back(flash);
    samples.push_back({name + "flash_attention_backward",
                       {f[0], q, k, v, f[0], f[1], f[2], f[3], 64, 64, 0.0, causal, f[4], f[5]},
                       {}});
    const Sample cudnn{name + "cudnn_attention", {q, k, v, none, true, 0.0, causal}, {}, {4, 5, 6}};
    const auto c = results_of(cudnn);
    samples.push_back(cudnn);
    samples.push_back({name + "cudnn_attention_backward",
                       {c[0], q, k, v, c[0], c[1], c[4], c[5], at::Tensor(), c[2], c[3], 64, 64, 0.0, causal},
                       {}});
  }
  for (const auto& b : {c10::IValue(), c10::IValue(bias)}) {
    const Sample efficient{name + "efficient_attention", {q, k, v, b, true}, {}, {2, 3}};
    const auto e = results_of(efficient);
    samples.push_back(efficient);
    const auto given = b.isTensor() ? b : c10::IValue(at::Tensor());
    samples.push_back({name + "efficient_attention_backward",
                       {e[0], q, k, v, given, e[0], e[1], e[2], e[3], 0.0, bools({true, true, true, b.isTensor()})},
                       {}});
  }
  return samples;
}

std::vector<Sample> norm_samples() {
  const auto x = on_gpu(numbers({2, 5, 8}), at::kFloat), w = on_gpu(numbers({8}), at::kFloat);
  const c10::IValue shape(std::vector<int64_t>{8});
  const Sample forward{"aten::_fused_rms_norm", {x, shape, w, 1e-5}, {}};
  const auto rstd = results_of(forward)[1];
  const auto backward = [&](bool weight) {
    return Sample{"aten::_fused_rms_norm_backward", {x.mul(0.5), x, shape, rstd, w, bools({true, weight})}, {}};
  };
  return {forward, backward(true), backward(false)};
}

std::vector<Sample> product_samples() {
  const auto bf16 = [](const at::Tensor& t) { return on_gpu(t, at::kBFloat16); };
  const auto float32 = static_cast<int64_t>(at::kFloat);
  const auto a = bf16(numbers({16, 32})), b = bf16(numbers({32, 48})), added = on_gpu(numbers({48}), at::kFloat);
  const auto batch_a = bf16(numbers({3, 16, 32})), batch_b = bf16(numbers({3, 32, 48}));
  const auto batch_added = on_gpu(numbers({3, 16, 48}), at::kFloat);
  const auto ends = [](std::vector<int> values) { return at::tensor(values, at::kInt).to(at::kCUDA); };
  // Scaled products: float8 matrices, the second in columns, with a scale per tensor, or per row and column.
  const auto x = on_gpu(numbers({32, 192}).sub(0.5), at::kFloat8_e4m3fn);
  const auto w = on_gpu(numbers({96, 192}).sub(0.4), at::kFloat8_e4m3fn).t();
  const auto one = on_gpu(at::full({}, 0.5), at::kFloat), rows = on_gpu(numbers({32, 1}), at::kFloat),
             columns = on_gpu(numbers({1, 96}), at::kFloat);
  const auto bias = bf16(numbers({96}));
  const c10::IValue none, to_bf16(static_cast<int64_t>(at::kBFloat16));
  return {
      {"aten::mm.dtype", {a, b, float32}, {}},
      {"aten::addmm.dtype", {added, a, b, float32}, {}},
      {"aten::bmm.dtype", {batch_a, batch_b, float32}, {}},
      {"aten::baddbmm.dtype", {batch_added, batch_a, batch_b, float32}, {}},
      {"aten::_grouped_mm", {batch_a, batch_b}, {}},
      {"aten::_grouped_mm", {bf16(numbers({40, 32})), batch_b, ends({8, 24, 40})}, {}},
      {"aten::_grouped_mm", {batch_a, bf16(numbers({32, 40})), ends({8, 24, 40})}, {}},
      {"aten::_grouped_mm", {bf16(numbers({16, 40})), bf16(numbers({40, 48})), ends({8, 24, 40})}, {}},
      {"aten::_scaled_mm", {x, w, one, one, bias, none, to_bf16}, {}},
      {"aten::_scaled_mm", {x, w, rows, columns, bias, none, to_bf16}, {}},
  };
}

TEST(CudaRules, HoldByBruteForce) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no CUDA device on this machine, or a build without CUDA";
  for (const auto make : {attention_samples, norm_samples, product_samples})
    for (const auto& sample : make()) {
      const auto report = verify_rule(sample);
      EXPECT_TRUE(report.wrong.empty()) << report;
      EXPECT_GT(report.strategies, 1) << report;
      std::cout << report.op << ": " << report.strategies << " strategies, " << report.cases << " cases\n";
    }
}

}  // namespace
}  // namespace tessera::testing
