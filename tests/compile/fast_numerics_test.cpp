// Numerics::Fast: the kernels that replace LibTorch's, beside LibTorch, and entire steps, beside eager mode.
#include "tessera/base/detail/parallel.h"
#include "tessera/compile/api/compile.h"
#include "tessera/compile/detail/codegen/product_choice.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/models/mlp.h"
#include "tessera/numerics/detail/vector/tiled_product.h"
#include "tessera/optim/adam.h"
#include "tessera/testing/detail/counting_allocator.h"
#include "tessera/testing/expect_error.h"

#include "expect_rewrite.h"
#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace tessera::compiler {
namespace {

namespace fs = std::filesystem;
using codegen::ProductShape;

// As torch.testing.assert_close.
bool is_close(const at::Tensor& found, const at::Tensor& wanted) {
  const bool is_double = wanted.scalar_type() == at::kDouble;
  return found.scalar_type() == wanted.scalar_type() && found.sizes() == wanted.sizes() &&
         at::allclose(found, wanted, is_double ? 1e-7 : 1.3e-6, is_double ? 1e-7 : 1e-5, /*equal_nan=*/true);
}

// ---- tiled products

// A matrix of this shape: by rows, by columns, with gaps between rows, with gaps between columns.
at::Tensor matrix(int64_t rows, int64_t columns, int layout) {
  switch (layout) {
    case 0:
      return torch::randn({rows, columns});
    case 1:
      return torch::randn({columns, rows}).t();
    case 2:
      return torch::randn({rows, columns + 3}).narrow(1, 2, columns);
    default:
      return torch::randn({columns, rows + 3}).narrow(1, 1, rows).t();
  }
}

double largest_error(const at::Tensor& found, const at::Tensor& exact) {
  return found.numel() == 0 ? 0 : (found.to(at::kDouble) - exact).abs().max().item<double>();
}

TEST(TiledProduct, IsAsExactAsLibTorch) {
  const int64_t shapes[][3] = {{0, 4, 5},  {4, 0, 5},    {4, 5, 0},      {1, 1, 1},      {1, 17, 33},
                               {17, 1, 5}, {3, 130, 64}, {129, 31, 257}, {256, 64, 128}, {300, 77, 19}};
  for (const auto& [m, n, k] : shapes)
    for (int layout = 0; layout < 16; layout++)
      for (const bool has_bias : {false, true}) {
        const auto a = matrix(m, k, layout % 4), b = matrix(k, n, layout / 4);
        const auto bias = has_bias ? std::optional(torch::randn({n})) : std::nullopt;
        const auto padded = torch::full({m, n + layout % 3}, 7.0);
        const auto out = padded.narrow(1, 0, n);
        numerics::tiled_product(out, a, b, {.bias = bias});
        auto exact = at::mm(a.to(at::kDouble), b.to(at::kDouble));
        if (has_bias) exact += bias->to(at::kDouble);
        const auto plain = has_bias ? at::addmm(*bias, a, b) : at::mm(a, b);
        EXPECT_LE(largest_error(out, exact), 4 * largest_error(plain, exact) + 1e-5)
            << m << "x" << n << "x" << k << ", layout " << layout;
        EXPECT_TRUE(padded.narrow(1, n, layout % 3).eq(7).all().item<bool>()) << "wrote between the rows of out";
      }
}

TEST(TiledProduct, HasTheSameBitsWithTwoThreads) {
  const auto a = torch::randn({70, 300}).t(), b = torch::randn({90, 70}).t();
  const auto one = torch::empty({300, 90}), two = torch::empty({300, 90});
  const auto threads = at::get_num_threads();
  at::set_num_threads(1);
  numerics::tiled_product(one, a, b);
  at::set_num_threads(2);
  const auto parts = parts_run_by_other_threads();
  numerics::tiled_product(two, a, b);
  EXPECT_EQ(parts_run_by_other_threads(), parts + 1);
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(one, two));
}

TEST(TiledProduct, RefusesOtherOperands) {
  const auto x = torch::ones({4, 4});
  const auto call = [&](const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                        const std::optional<at::Tensor>& bias) { numerics::tiled_product(out, a, b, {.bias = bias}); };
  EXPECT_ERROR(UsageError, call(x, x.to(at::kDouble), x, {}), "a is a Double tensor");
  EXPECT_ERROR(UsageError, call(x, x, torch::ones({8, 8}).slice(0, 0, 8, 2).slice(1, 0, 8, 2), {}),
               "b of shape [4, 4] has strides [16, 2]");
  EXPECT_ERROR(UsageError, call(x, x, torch::ones({3, 4}), {}), "write a (m, k), b (k, n), out (m, n)");
  EXPECT_ERROR(UsageError, call(x, x, x, torch::ones({3})), "the bias must be");
}

TEST(ProductChoice, ShapesAreTextBothWays) {
  const ProductShape shape{512, 256, 1024, false, true, 2};
  EXPECT_EQ(c10::str(shape), "512x256x1024 nt 2");
  EXPECT_EQ(codegen::parse_product_shape("512x256x1024 nt 2"), shape);
  for (const auto* text : {"", "512x256 nt 2", "512x256x1024 nx 2", "512x256x1024 nt 2 ", "512x256x1024 nt"})
    EXPECT_FALSE(codegen::parse_product_shape(text)) << text;
}

// A folder for the kernel cache that is deleted at the end.
class CacheFolder {
 public:
  CacheFolder() {
    std::string pattern = ::testing::TempDir() + "productsXXXXXX";
    path_ = mkdtemp(pattern.data());
    if (const auto* before = std::getenv("TESSERA_CACHE_DIR")) before_ = before;
    setenv("TESSERA_CACHE_DIR", path_.c_str(), 1);
  }
  ~CacheFolder() {
    before_.empty() ? unsetenv("TESSERA_CACHE_DIR") : setenv("TESSERA_CACHE_DIR", before_.c_str(), 1);
    fs::remove_all(path_);
  }
  CacheFolder(const CacheFolder&) = delete;
  fs::path file() const { return path_ / "products"; }
  std::string text() const {
    std::ifstream in(file());
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  fs::path path_;
  std::string before_;
};

TEST(ProductChoice, IsRememberedOnDisk) {
  const ProductShape shape{64, 48, 32, false, true, 1};
  std::string header;
  {
    const CacheFolder folder;
    const bool tiled = codegen::tiled_product_is_faster(shape);
    const auto text = folder.text();
    header = text.substr(0, text.find('\n') + 1);
    EXPECT_EQ(text, header + "64x48x32 nt 1: " + (tiled ? "tiled" : "mm") + "\n");
  }
  for (const bool tiled : {false, true}) {  // what the file says is not measured again; other lines are ignored
    const CacheFolder folder;
    std::ofstream(folder.file()) << header
                                 << "nonsense\n64x48x32 nt 1: perhaps\n64x48x32 nt 1: " << (tiled ? "tiled" : "mm")
                                 << "\n";
    fs::permissions(folder.file(), fs::perms::owner_read | fs::perms::owner_write);
    EXPECT_EQ(codegen::tiled_product_is_faster(shape), tiled);
  }
  const CacheFolder folder;
  std::ofstream(folder.file()) << "of another machine\n64x48x32 nt 1: mm\n";
  fs::permissions(folder.file(), fs::perms::owner_read | fs::perms::owner_write);
  codegen::tiled_product_is_faster(shape);
  EXPECT_TRUE(folder.text().starts_with(header)) << "another machine's file is replaced";
}

TEST(FastProducts, ReplaceLargeProductsAlone) {
  const CacheFolder folder;
  std::ofstream file(folder.file());
  codegen::tiled_product_is_faster({32, 32, 32, false, false, 1});  // writes the first line
  const auto header = folder.text().substr(0, folder.text().find('\n') + 1);
  const CacheFolder other;
  std::ofstream(other.file()) << header << "128x128x128 nt " << at::get_num_threads() << ": tiled\n";
  fs::permissions(other.file(), fs::perms::owner_read | fs::perms::owner_write);
  expect_rewrite("fast_products", R"(input %0: f32[128, 128] argument "0"
input %1: f32[128, 128] parameter "weight"
input %2: f32[128] parameter "bias"
input %3: f32[8, 128] argument "1"
%4: f32[128, 128]{1, 128} in %1 = aten.t(%1)
%5: f32[128, 128] = aten.addmm(%2, %0, %4, 1, 1)
%6: f32[8, 128] = aten.mm(%3, %5)
return %5
return %6
)",
                 R"(input %0: f32[128, 128] argument "0"
input %1: f32[128, 128] parameter "weight"
input %2: f32[128] parameter "bias"
input %3: f32[8, 128] argument "1"
%4: f32[128, 128]{1, 128} in %1 = aten.t(%1)
%5: f32[128, 128] = aten.empty_strided([128, 128], [128, 1], 6, none, device("cpu"), none)
tessera.cpu_kernel([%5!], [%0, %4, %2], [], "matmul")
%6: f32[8, 128] = aten.mm(%3, %5)
return %5
return %6
)");
}

// ---- small functions

// The program after fuse_small_ops, replayed and interpreted, beside the original one, run op by op by LibTorch.
void expect_fused(const std::string& text, const char* what) {
  const auto original = parse(text);
  verify(original);
  auto program = original;
  EXPECT_GT(fuse_small_ops(program).times, 0) << what;
  verify(program);
  Tensors inputs;
  for (const auto& input : original.inputs) {
    const auto& type = original[input.value].type;
    auto t = torch::empty_strided(type.sizes, type.strides, type.dtype);
    t.copy_(torch::randn(type.sizes));
    inputs.push_back(t);
  }
  const auto wanted_inputs = clones(inputs), found_inputs = clones(inputs), interpreted_inputs = clones(inputs);
  auto wanted = interpret(original, wanted_inputs);
  const auto executable = executable_for(program, found_inputs);
  executable->run();
  auto found = outputs_of(*executable), interpreted = interpret(program, interpreted_inputs);
  wanted.insert(wanted.end(), wanted_inputs.begin(), wanted_inputs.end());
  found.insert(found.end(), found_inputs.begin(), found_inputs.end());
  interpreted.insert(interpreted.end(), interpreted_inputs.begin(), interpreted_inputs.end());
  for (size_t i = 0; i < wanted.size(); i++) {
    EXPECT_TRUE(is_close(found[i], wanted[i])) << what << ", tensor " << i << ":\n"
                                               << found[i] << "\nand not\n"
                                               << wanted[i];
    EXPECT_TRUE(is_close(interpreted[i], wanted[i])) << what << ", interpreted, tensor " << i;
  }
}

std::string type_text(const char* dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides = {}) {
  std::ostringstream out;
  const auto list = [&](const char* open, const std::vector<int64_t>& of, const char* close) {
    out << open;
    for (size_t i = 0; i < of.size(); i++) out << (i ? ", " : "") << of[i];
    out << close;
  };
  out << dtype;
  list("[", sizes, "]");
  if (!strides.empty()) list("{", strides, "}");
  return out.str();
}

// One program per dtype for all shapes: the compiler runs twice.
TEST(SmallFunctions, ProductsOfAllShapesAndLayouts) {
  const int64_t shapes[][3] = {{1, 1, 1},  {8, 16, 10}, {5, 1, 7}, {1, 9, 4},
                               {3, 17, 0}, {0, 3, 2},   {2, 0, 3}, {33, 7, 13}};
  for (const auto* dtype : {"f32", "f64"}) {
    std::ostringstream inputs, nodes, returns;
    int next = 0;
    std::vector<std::pair<int, std::string>> declared;
    for (const auto& [m, n, k] : shapes)
      for (int layout = 0; layout < 4; layout++) {
        const auto a = next++, b = next++, bias = next++;
        const auto one = [](int64_t size) { return std::max<int64_t>(size, 1); };
        inputs << "input %" << a << ": "
               << type_text(dtype, {m, k},
                            layout & 1 ? std::vector<int64_t>{1, one(m)} : std::vector<int64_t>{one(k), 1})
               << " argument \"" << a << "\"\ninput %" << b << ": "
               << type_text(dtype, {k, n},
                            layout & 2 ? std::vector<int64_t>{1, one(k)} : std::vector<int64_t>{one(n), 1})
               << " argument \"" << b << "\"\ninput %" << bias << ": " << type_text(dtype, {n}) << " argument \""
               << bias << "\"\n";
      }
    int input = 0;
    for (const auto& [m, n, k] : shapes)
      for (int layout = 0; layout < 4; layout++, input += 3) {
        nodes << "%" << next << ": " << type_text(dtype, {m, n}) << " = aten.mm(%" << input << ", %" << input + 1
              << ")\n%" << next + 1 << ": " << type_text(dtype, {m, n}) << " = aten.addmm(%" << input + 2 << ", %"
              << input << ", %" << input + 1 << ", 1, 1)\n";
        returns << "return %" << next << "\nreturn %" << next + 1 << "\n";
        next += 2;
      }
    expect_fused(inputs.str() + nodes.str() + returns.str(), dtype);
  }
}

TEST(SmallFunctions, SumsAndPointwiseOpsOfAllLayouts) {
  expect_fused(R"(input %0: f32[3, 4, 5] argument "0"
input %1: f32[4, 3]{1, 4} argument "1"
input %2: f32[4, 1] argument "2"
input %3: f32[0, 4] argument "3"
input %4: f32[] argument "4"
input %5: f64[7] argument "5"
%6: f32[] = aten.sum(%0, none)
%7: f32[3, 5] = aten.sum.dim_IntList(%0, [1], false, none)
%8: f32[1, 4, 1] = aten.sum.dim_IntList(%0, [0, -1], true, none)
%9: f32[4] = aten.sum.dim_IntList(%3, [0], false, none)
%10: f32[] = aten.mean(%1, none)
%11: f32[4, 1] = aten.mean.dim(%1, [1], true, none)
%12: f64[] = aten.sum(%5, none)
%13: f32[4, 3]{1, 4} = aten.add.Tensor(%1, %2, 1)
%14: f32[4, 3]{1, 4} = aten.mul.Tensor(%1, %4)
%15: f32[3, 4, 5] = aten.sub.Tensor(%0, %4, 0.5)
%16: f32[4, 3]{1, 4} = aten.relu(%13)
%17: f32[4, 3]{1, 4} = aten.threshold_backward(%14, %16, 0)
%18: f32[] = aten.exp(%4)
%19: f32[4, 1] = aten.tanh(%2)
%20: f32[4, 1] = aten.sigmoid(%2)
%21: f32[4, 1] = aten.tanh_backward(%19, %20)
%22: f32[4, 1] = aten.sigmoid_backward(%21, %20)
%23: f32[4, 3] = aten.ones_like(%1, none, none, none, none, 0)
%24: f32[4, 1] in %2 = aten.add_.Tensor(%2!, %22, 2)
%25: f32[] = aten.sum(%24, none)
%26: f32[3, 4, 5] = aten.pow.Tensor_Scalar(%0, 3)
%27: f32[3, 4, 5] = aten.pow.Tensor_Scalar(%0, 1)
%28: f32[2] = aten.ones([2], 6, none, none, false)
%29: f32[2] = aten.full([2], 0.3, 6, none, none, false)
return %6
return %7
return %8
return %9
return %10
return %11
return %12
return %13
return %14
return %15
return %17
return %18
return %23
return %25
return %26
return %27
return %28
return %29
)",
               "all layouts");
}

// A pass that fuses these would read what it has overwritten, or write elements twice.
TEST(SmallFunctions, LeavePartialOverlapsToLibTorch) {
  for (const auto* text : {R"(input %0: f32[6] argument "0"
%1: f32[5] in %0 = aten.slice.Tensor(%0, 0, 0, 5, 1)
%2: f32[5] in %0 + 1 = aten.slice.Tensor(%0, 0, 1, 6, 1)
%3: f32[5] in %0 + 1 = aten.add_.Tensor(%2!, %1, 1)
%4: f32[] = aten.sum(%0, none)
return %4
)"}) {
    auto program = parse(text);
    fuse_small_ops(program);
    const auto kept = std::count_if(program.nodes.begin(), program.nodes.end(),
                                    [](const Node& node) { return node.name() == "aten.add_.Tensor"; });
    EXPECT_EQ(kept, 1) << text_of(program);
  }
}

TEST(SmallFunctions, PointwiseOpsAloneKeepTheirBits) {
  EXPECT_EQ(matches("fuse_small_ops", R"(input %0: f32[6] argument "0"
%1: f32[6] = aten.relu(%0)
%2: f32[6] = aten.exp(%1)
return %2
)"),
            0);
}

// ---- steps

template <class F>
void expect_step_is_close(const CompileOptions& options, const F& check) {
  torch::manual_seed(3);
  models::MLP start(models::mlp_module());
  auto copy = [&] { return std::dynamic_pointer_cast<std::remove_reference_t<decltype(*start)>>(start->clone()); };
  models::MLP eager(copy()), model(copy());
  optim::AdamW eager_opt(eager->parameters(), {.lr = 0.01, .fused = true}),
      opt(model->parameters(), {.lr = 0.01, .fused = true});
  auto step = compile(train_step, options);
  for (int i = 0; i < 20; i++) {
    const auto x = torch::randn({8, 10});
    const auto wanted = train_step(eager, eager_opt, x), found = step(model, opt, x);
    check(found, wanted.detach());
    for (size_t p = 0; p < eager->parameters().size(); p++)
      check(model->parameters()[p].detach(), eager->parameters()[p].detach());
  }
}

TEST(Numerics, FastIsCloseToEagerModeAndStrictIsEqual) {
  expect_step_is_close({.numerics = Numerics::Strict},
                       [](const auto& found, const auto& wanted) { EXPECT_TRUE(at::equal(found, wanted)); });
  expect_step_is_close({.numerics = Numerics::Fast},
                       [](const auto& found, const auto& wanted) { EXPECT_TRUE(is_close(found, wanted)); });
}

// Gradients share memory with activations, and activations of gelu and layer norm are recomputed.
TEST(Numerics, AFastStepNeedsLessMemoryThanEagerMode) {
  const auto peak = [](bool compiled) {
    torch::manual_seed(5);
    testing::CountingAllocator count;
    torch::nn::Sequential model;
    for (int i = 0; i < 3; i++) {
      model->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({128})));
      model->push_back(torch::nn::Linear(128, 512));
      model->push_back(torch::nn::GELU());
      model->push_back(torch::nn::Linear(512, 128));
    }
    optim::AdamW opt(model->parameters(), {.fused = true});
    const auto x = torch::randn({512, 128});
    auto step = compile(
        [](auto& sequential, auto& optimizer, const at::Tensor& in) {
          optimizer.zero_grad();
          auto loss = sequential->forward(in).pow(2).mean();
          loss.backward();
          optimizer.step();
          return loss;
        },
        {.backend = compiled ? "tessera" : "eager", .captures = Captures::None, .numerics = Numerics::Fast});
    for (int i = 0; i < 3; i++) {
      count.reset_peak();
      step(model, opt, x);
    }
    return count.peak_bytes();
  };
  const auto eager = peak(false), compiled = peak(true);
  EXPECT_LT(static_cast<double>(compiled), 0.85 * static_cast<double>(eager)) << compiled << " and " << eager;
}

TEST(Numerics, AFastMlpStepIsOneFunction) {
  models::MLP model(models::mlp_module());
  optim::AdamW opt(model->parameters(), {.fused = true});
  auto step = compile(train_step, {.numerics = Numerics::Fast});
  const auto x = torch::randn({8, 10});
  for (int i = 0; i < 3; i++) step(model, opt, x);
  const auto& nodes = step.executable().program().nodes;
  EXPECT_EQ(std::count_if(nodes.begin(), nodes.end(), is_generated), 1) << step.listing();
}

}  // namespace
}  // namespace tessera::compiler
