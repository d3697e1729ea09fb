// Generated kernels: what is fused, that results are bitwise equal to LibTorch's, and the cache of built libraries.
#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/compile/detail/codegen/lower.h"
#include "tessera/compile/detail/codegen/pointwise.h"
#include "tessera/compile/detail/codegen/system_compiler.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/replay/interpret.h"
#include "tessera/testing/expect_error.h"

#include "captured_warnings.h"
#include "expect_rewrite.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

namespace tessera::compiler {
namespace {

namespace fs = std::filesystem;
using codegen::KernelLibrary;
using testing::error_message;

// Each test has its own kernel cache folder.
class Codegen : public ::testing::Test {
 protected:
  Codegen() {
    std::string pattern = ::testing::TempDir() + "codegenXXXXXX";
    folder_ = mkdtemp(pattern.data());
    setenv("TESSERA_CACHE_DIR", folder_.c_str(), 1);
  }
  ~Codegen() override { fs::remove_all(folder_); }
  fs::path folder_;
};

// Sets an environment variable while it is alive.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  ~ScopedEnvironment() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  ScopedEnvironment(const ScopedEnvironment&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

Settings with_codegen() { return settings_from({.codegen = true, .verified = true}); }

// Matches of fuse_pointwise; -1 if the pass did not run.
int64_t fused_by(const std::vector<PassReport>& lowering) {
  for (const auto& pass : lowering)
    if (pass.name == "fuse_pointwise") return pass.matched.times;
  return -1;
}

Program fused(const std::string& text) {
  auto program = parse(text);
  verify(program);
  fuse_pointwise(program);
  verify(program);
  return program;
}

void expect_same_bits(const Tensors& found, const Tensors& wanted, const std::string& what) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); i++) {
    const auto a = found[i].contiguous(), b = wanted[i].contiguous();
    ASSERT_EQ(a.nbytes(), b.nbytes());
    EXPECT_EQ(std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()), 0) << what << ", output " << i << ":\n"
                                                                      << found[i] << "\nwanted\n"
                                                                      << wanted[i];
  }
}

// The fused program, replayed and interpreted, equals the original program run op by op by LibTorch. Outputs and
// mutated inputs are compared.
void expect_same_as_aten(const std::string& text, const Tensors& inputs) {
  const auto original = parse(text);
  const auto program = fused(text);
  const auto wanted_inputs = clones(inputs), found_inputs = clones(inputs), interpreted_inputs = clones(inputs);
  const auto wanted = interpret(original, wanted_inputs);
  const auto executable = executable_for(program, found_inputs);
  executable->run();
  expect_same_bits(outputs_of(*executable), wanted, "replayed");
  expect_same_bits(found_inputs, wanted_inputs, "inputs, replayed");
  expect_same_bits(interpret(program, interpreted_inputs), wanted, "interpreted");
  expect_same_bits(interpreted_inputs, wanted_inputs, "inputs, interpreted");
}

// The text of a program without the sources of its kernels.
std::string nodes_of(const Program& program) {
  std::istringstream in(text_of(program));
  std::string text;
  for (std::string line; std::getline(in, line);)
    if (!line.starts_with("kernel ")) text += line + "\n";
  return text;
}

// Random numbers with special values: signed zeros, infinities, NaN, subnormal and very large numbers.
at::Tensor special_values(int64_t n, c10::ScalarType dtype, size_t seed) {
  auto x = torch::randn({n}, dtype);
  const double special[] = {-0.0, INFINITY, -INFINITY, 1e-40, 0.25, 0.0, 3e38, NAN};
  for (int64_t i = 0; i < 8 && n > 8; i++) x[(i * 7 + static_cast<int64_t>(seed) * 11) % n] = special[i];
  return x;
}

const char* short_of(c10::ScalarType dtype) { return dtype == c10::kFloat ? "f32" : "f64"; }

// Builds the text of a program of single ops. An op that mutates an argument gets a clone of it. All results are
// returned.
class ProgramText {
 public:
  void add_input(int64_t n, c10::ScalarType dtype) {
    text_ << "input %" << next_ << ": " << short_of(dtype) << "[" << n << "] argument \"" << next_ << "\"\n";
    next_++;
  }
  void add_op(const std::string& name, int64_t n, c10::ScalarType dtype, const std::vector<int>& inputs) {
    const auto type = c10::str(short_of(dtype), "[", n, "]");
    const auto op = find_op(name);
    std::string args, written;
    size_t tensors = 0;
    std::vector<std::string> results;
    for (size_t i = 0; i < op.schema().arguments().size(); i++) {
      const auto& argument = op.schema().arguments()[i];
      const auto tensor = [&] {
        auto id = c10::str("%", inputs[tensors++ % inputs.size()]);
        if (!writes_argument(op, i)) return id;
        text_ << "%" << next_ << ": " << type << " = aten.clone(" << id << ", none)\n";
        written = c10::str("%", next_++);
        results.push_back(written);
        return written + "!";
      };
      args += i ? ", " : "";
      if (argument.type()->kind() == c10::TypeKind::TensorType)
        args += tensor();
      else if (argument.type()->kind() == c10::TypeKind::ListType)
        args += "[" + tensor() + ", " + tensor() + "]";
      else if (argument.name() == "alpha")
        args += "1";
      else if (argument.name() == "exponent")
        args += "2";
      else if (argument.name() == "threshold")
        args += "0.25";  // some elements are equal to it
      else if (argument.type()->kind() == c10::TypeKind::NumberType)
        args += "0.3";  // cannot be represented exactly
      else
        args += argument.type()->kind() == c10::TypeKind::BoolType ? "false" : "none";
    }
    const auto result = [&] {
      const auto id = c10::str("%", next_++);
      results.push_back(id);
      return c10::str(id, ": ", type, written.empty() ? "" : " in " + written);
    };
    if (!op.schema().returns().empty())
      text_ << (op.schema().returns()[0].type()->kind() == c10::TypeKind::ListType
                    ? "[" + result() + ", " + result() + "]"
                    : result())
            << " = ";
    text_ << name << "(" << args << ")\n";
    for (const auto& id : results) returns_ << "return " << id << "\n";
  }
  std::string text() const { return text_.str() + returns_.str(); }

 private:
  std::ostringstream text_, returns_;
  int next_ = 0;
};

TEST_F(Codegen, EveryPointwiseOpIsBitwiseEqualToLibTorch) {
  ProgramText text;
  Tensors inputs;
  std::vector<std::tuple<int64_t, c10::ScalarType, std::vector<int>>> operands;
  for (const auto dtype : {c10::kFloat, c10::kDouble})
    for (const int64_t n : {1, 7, 64, 1000}) {
      if (dtype == c10::kDouble && n != 1000) continue;  // each size costs compile time
      std::vector<int> ids;
      for (size_t i = 0; i < 4; i++) {
        ids.push_back(static_cast<int>(inputs.size()));
        inputs.push_back(special_values(n, dtype, i));
        text.add_input(n, dtype);
      }
      operands.emplace_back(n, dtype, ids);
    }
  for (const auto& [n, dtype, ids] : operands)
    for (const auto& name : codegen::pointwise_ops()) text.add_op(name, n, dtype, ids);
  for (const auto& node : fused(text.text()).nodes)
    EXPECT_TRUE(is_generated(node) || kind_of(node) == OpKind::Empty) << node.name();
  expect_same_as_aten(text.text(), inputs);
}

constexpr const char* kChain = R"(input %0: f32[4, 2] argument "x"
input %1: f32[8] parameter "w"
%2: f32[8] in %0 = aten.view(%0, [8])
%3: f32[8] = aten.mul.Tensor(%2, %1)
%4: f32[4, 2] in %3 = aten.view(%3, [4, 2])
%5: f32[4, 2] = aten.relu(%4)
%6: f32[8] in %1 = aten.add_.Tensor(%1!, 0.1, 1)
%7: f32[2] = aten.sum.dim_IntList(%5, [0], false, none)
%8: f32[8] = aten.sub.Tensor(%6, %2, 1)
return %7
return %8
)";

TEST_F(Codegen, ChainOfPointwiseOpsIsOneKernel) {
  const auto program = fused(kChain);
  EXPECT_EQ(nodes_of(program), R"(input %0: f32[4, 2] argument "x"
input %1: f32[8] parameter "w"
%2: f32[8] in %0 = aten.view(%0, [8])
%5: f32[4, 2] = aten.empty_strided([4, 2], [2, 1], 6, none, device("cpu"), none)
tessera.cpp_kernel([%5!, %1!], [%2], "cpp_fused_add_mul_relu_0")
%7: f32[2] = aten.sum.dim_IntList(%5, [0], false, none)
%8: f32[8] = aten.empty_strided([8], [1], 6, none, device("cpu"), none)
tessera.cpp_kernel([%8!], [%1, %2], "cpp_fused_sub_1")
return %7
return %8
)");
  EXPECT_EQ(program.kernels.at("cpp_fused_add_mul_relu_0"), R"(int64_t cpp_fused_add_mul_relu_0_calls = 0;
void cpp_fused_add_mul_relu_0(void* const* operands, int64_t part, int64_t parts) {
  if (part == 0) __atomic_fetch_add(&cpp_fused_add_mul_relu_0_calls, 1, __ATOMIC_RELAXED);
  float* __restrict out0 = (float*)operands[0];
  float* __restrict out1 = (float*)operands[1];
  const float* __restrict in0 = (const float*)operands[2];
  for (int64_t i = 8 * part / parts, end = 8 * (part + 1) / parts; i < end; i++) {
    const float v0 = in0[i];
    const float v1 = out1[i];
    const float v2 = v0 * v1;
    const float v3 = v2 < 0 ? 0 : v2;
    const float v4 = v1 + 0.1f;
    out0[i] = v3;
    out1[i] = v4;
  }
}
)");
  const auto text = text_of(program);
  EXPECT_EQ(text_of(parse(text)), text_of(parse(text_of(parse(text)))));
  EXPECT_EQ(parse(text).kernels, program.kernels);
  expect_same_as_aten(kChain, {torch::randn({4, 2}), torch::randn({8})});
}

constexpr const char* kBucket = R"(input %0: f32[3, 2] argument "a"
input %1: f32[5] argument "b"
%2: f32[6] in %0 = aten.flatten.using_ints(%0, 0, -1)
%3: f32[5] in %1 = aten.flatten.using_ints(%1, 0, -1)
%4: f32[11] = aten.cat([%2, %3], 0)
%5: f32[11] = aten.div.Tensor(%4, 3)
return %5
)";

TEST_F(Codegen, ConcatenationIsFused) {
  const auto program = fused(kBucket);
  EXPECT_EQ(nodes_of(program), R"(input %0: f32[3, 2] argument "a"
input %1: f32[5] argument "b"
%2: f32[6] in %0 = aten.flatten.using_ints(%0, 0, -1)
%3: f32[5] in %1 = aten.flatten.using_ints(%1, 0, -1)
%5: f32[11] = aten.empty_strided([11], [1], 6, none, device("cpu"), none)
tessera.cpp_kernel([%5!], [%2, %3], "cpp_fused_cat_div_0")
return %5
)");
  expect_same_as_aten(kBucket, {torch::randn({3, 2}), torch::randn({5})});
}

TEST_F(Codegen, ForeachOpHasOneLoopPerItem) {
  const std::string text = R"(input %0: f32[3, 2] argument "a"
input %1: f64[5, 3]{1, 5} argument "b"
[%2: f32[3, 2], %3: f64[5, 3]{1, 5}] = aten._foreach_div.Scalar([%0, %1], 7)
return %2
return %3
)";
  const auto program = fused(text);
  ASSERT_EQ(program.kernels.size(), 1u);
  EXPECT_EQ(program.kernels.begin()->first, "cpp_fused__foreach_div_0");
  expect_same_as_aten(text, {torch::randn({3, 2}), torch::randn({3, 5}, torch::kDouble).t()});
}

// A fused loop would give wrong values here: operands overlap at an offset, or have another element order.
TEST_F(Codegen, OverlappingViewsAreNotFused) {
  const std::string text = R"(input %0: f32[10] argument "x"
%1: f32[9] in %0 = aten.slice.Tensor(%0, 0, 0, 9, 1)
%2: f32[9] in %0 + 1 = aten.slice.Tensor(%0, 0, 1, 10, 1)
%3: f32[9] = aten.neg(%2)
%4: f32[9] in %0 = aten.copy_(%1!, %3, false)
%5: f32[9] = aten.mul.Tensor(%2, 3)
%6: f32[3, 3] in %5 = aten.view(%5, [3, 3])
%7: f32[3, 3]{1, 3} in %6 = aten.t(%6)
%8: f32[3, 3] = aten.add.Tensor(%6, %7, 1)
%9: f32[18] = aten.cat([%1, %2], 0)
%10: f32[9] in %9 + 9 = aten.slice.Tensor(%9, 0, 9, 18, 1)
%11: f32[9] = aten.neg(%10)
return %5
return %8
return %11
)";
  EXPECT_EQ(fused(text).kernels.size(), 3u)  // the two negations share one
      << fused(text);
  expect_same_as_aten(text, {torch::randn({10})});
}

// A buffer that only the kernel uses becomes a variable if the kernel writes it first. If the kernel reads it first, it
// must be memory.
TEST_F(Codegen, TemporaryBufferBecomesAVariable) {
  const std::string text = R"(input %0: f32[4] argument "x"
%1: f32[4] = aten.empty.memory_format([4], 6, none, none, none, none)
%2: f32[4] in %1 = aten.WRITE
%3: f32[4] = aten.mul.Tensor(%2, %0)
return %3
)";
  const auto with = [&](const std::string& write) {
    auto changed = text;
    return nodes_of(fused(changed.replace(changed.find("WRITE"), 5, write)));
  };
  EXPECT_CONTAINS(with("copy_(%1!, %0, false)"), "cpp_kernel([%3!], [%0], \"cpp_fused_copy_mul_0\")");
  EXPECT_EQ(with("copy_(%1!, %0, false)").find("memory_format"), std::string::npos);
  EXPECT_CONTAINS(with("neg_(%1!)"), "cpp_kernel([%1!, %3!], [%0], \"cpp_fused_mul_neg_0\")");
  EXPECT_CONTAINS(with("neg_(%1!)"), "memory_format");
}

TEST_F(Codegen, CallsAreCountedAndInTheListing) {
  auto program = parse(kBucket);
  EXPECT_EQ(fused_by(lower(program, with_codegen())), 1);
  const auto a = torch::randn({3, 2}), b = torch::randn({5});
  const auto executable = executable_for(program, {a, b});
  ASSERT_TRUE(executable->library());
  const auto before = executable->library()->calls("cpp_fused_cat_div_0");
  Tensors returned;
  for (int i = 1; i <= 3; i++) {
    a.fill_(i);
    executable->run();
    returned.push_back(executable->output(program.outputs[0]));
    EXPECT_EQ(executable->library()->calls("cpp_fused_cat_div_0"), before + i);
  }
  for (int i = 1; i <= 3; i++)  // every run returns new memory
    EXPECT_TRUE(at::equal(returned[static_cast<size_t>(i - 1)], at::cat({a.flatten().fill_(i), b}) / 3));
  EXPECT_NE(executable->listing().find("\ncpp_fused_cat_div_0([%5!], [%2, %3])  # ran 3\n"), std::string::npos)
      << executable->listing();
  // Operands follow a rebinding.
  const auto other = torch::randn({8});
  executable->bind(program.buffer_of(program.inputs[1].value), other.storage(), 3);
  executable->run();
  EXPECT_TRUE(at::equal(executable->output(program.outputs[0]), at::cat({a.flatten(), other.slice(0, 3)}) / 3));
  EXPECT_CONTAINS(error_message<InternalError>([&] { executable->library()->calls("cpp_fused_add_7"); }),
                  "cpp_fused_add_7");
}

TEST_F(Codegen, LargeLoopsAreSplitOverThreads) {
  const auto threads = at::get_num_threads();
  at::set_num_threads(3);
  const std::string text = R"(input %0: f32[300001] argument "x"
%1: f32[300001] = aten.div.Tensor(%0, 3)
return %1
)";
  const auto x = torch::randn({300001});
  const auto executable = executable_for(fused(text), {x});
  const auto before = executable->library()->calls("cpp_fused_div_0"), parts = parts_run_by_other_threads();
  executable->run();
  EXPECT_TRUE(at::equal(outputs_of(*executable)[0], x / 3));
  EXPECT_EQ(executable->library()->calls("cpp_fused_div_0"), before + 1);
  EXPECT_EQ(parts_run_by_other_threads(), parts + 2);
  at::set_num_threads(threads);
}

TEST_F(Codegen, LibrariesAreCachedOnDiskAndDamagedOnesRebuilt) {
  const auto kernels = fused(kBucket).kernels;
  const auto before = KernelLibrary::builds();
  auto library = KernelLibrary::load(kernels);
  EXPECT_EQ(KernelLibrary::builds(), before + 1);
  EXPECT_EQ(KernelLibrary::load(kernels), library);
  const auto path = library->path();
  library.reset();
  EXPECT_EQ(KernelLibrary::load(kernels)->path(), path);
  EXPECT_EQ(KernelLibrary::builds(), before + 1);

  const auto bytes = [&] {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const auto good = bytes();
  const auto other = KernelLibrary::load(fused(kChain).kernels);
  EXPECT_EQ(KernelLibrary::builds(), before + 2);
  auto changed = good;
  changed[good.size() / 2] ^= 1;
  std::ifstream in(other->path(), std::ios::binary);
  const std::string foreign(std::istreambuf_iterator<char>(in), {});
  int64_t rebuilt = 0;
  for (const auto& bad : {changed, good.substr(0, good.size() / 2), std::string(), foreign}) {
    std::ofstream(path, std::ios::binary) << bad;
    CapturedWarnings warnings;
    EXPECT_NE(KernelLibrary::load(kernels)->function("cpp_fused_cat_div_0"), nullptr);
    EXPECT_EQ(KernelLibrary::builds(), before + 3 + rebuilt);
    EXPECT_EQ(bytes(), good);
    EXPECT_EQ(warnings.messages.size(), rebuilt == 0 ? 1u : 0u);  // one warning per file
    EXPECT_EQ(warnings.count(path + " is damaged"), warnings.messages.size());
    rebuilt++;
  }
}

TEST_F(Codegen, WithoutACompilerProgramsAreNotFused) {
  auto program = parse(kBucket);
  const auto text = text_of(program);
  CapturedWarnings warnings;
  {
    const ScopedEnvironment compiler("CXX", "/nonexistent/c++"), path("PATH", "/nonexistent");
    EXPECT_FALSE(codegen::compiler_available());
    for (int i = 0; i < 2; i++) EXPECT_EQ(fused_by(lower(program, with_codegen())), -1);
    EXPECT_ERROR(UsageError, KernelLibrary::load({}), "no C++ compiler", "/nonexistent/c++");
  }
  EXPECT_TRUE(codegen::compiler_available());
  ASSERT_EQ(warnings.messages.size(), 1u);
  EXPECT_CONTAINS(warnings.messages[0], "replayed op by op");

  const auto broken = folder_ / "broken";
  std::ofstream(broken) << "#!/bin/sh\n[ \"$1\" = --version ] || { echo out of order; exit 3; }\n";
  fs::permissions(broken, fs::perms::owner_all);
  const ScopedEnvironment compiler("CXX", broken.string());
  for (int i = 0; i < 2; i++) EXPECT_EQ(fused_by(lower(program, with_codegen())), -1);
  ASSERT_EQ(warnings.messages.size(), 2u);
  EXPECT_CONTAINS(warnings.messages[1], "ended with exit code 3:\nout of order");
  EXPECT_EQ(text_of(program), text);
  EXPECT_EQ(fused_by(lower(program, settings_from({.codegen = false}))), -1);
}

TEST_F(Codegen, KernelCanOnlyBeCalledByItsProgram) {
  const auto x = torch::ones({2});
  const auto op = find_op("tessera.cpp_kernel");
  torch::jit::Stack stack{Tensors{x}, Tensors{}, "cpp_fused_div_0"};
  EXPECT_CONTAINS(error_message<UsageError>([&] { op.callBoxed(stack); }), "outside of a program");
  auto program = fused(kBucket);
  program.kernels.clear();
  EXPECT_CONTAINS(error_message<InternalError>([&] { verify(program); }), "no kernel of that name");
}

// A random program of pointwise ops, views and mutations on few buffers, so that many ops depend on each other.
class RandomProgram {
 public:
  explicit RandomProgram(unsigned seed) : random_(seed) {}

  std::string text(int ops) {
    for (int i = 0; i < 3; i++) {
      body_ << "input %" << next_ << ": f32[24] argument \"" << next_ << "\"\n";
      values_.push_back({next_++, i, 0, 24});
    }
    buffers_ = 3;
    for (int i = 0; i < ops; i++) add();
    for (const auto& value : values_) body_ << "return %" << value.id << "\n";
    return body_.str();
  }

 private:
  struct Value {
    int id, buffer, offset, n;
  };
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  const Value& any() { return values_[values_.size() - 1 - static_cast<size_t>(below(std::min(8, size())))]; }
  int size() const { return static_cast<int>(values_.size()); }
  Value like(int n) {
    std::vector<Value> fitting;
    for (const auto& value : values_)
      if (value.n == n) fitting.push_back(value);
    return fitting[static_cast<size_t>(below(static_cast<int>(fitting.size())))];
  }
  bool overlap(const Value& a, const Value& b) const {
    return a.buffer == b.buffer && a.offset < b.offset + b.n && b.offset < a.offset + a.n && a.offset != b.offset;
  }
  int root(int buffer) const {
    for (const auto& value : values_)
      if (value.buffer == buffer) return value.id;
    return -1;
  }
  std::string alias_text(const Value& value) const {
    return c10::str("%", value.id, ": f32[", value.n, "] in %", root(value.buffer),
                    value.offset ? c10::str(" + ", value.offset) : "");
  }
  void add() {
    const auto a = any(), b = like(a.n);
    switch (below(8)) {
      case 0:
      case 1: {  // view
        const int n = std::max(1, a.n / 2), begin = below(a.n - n + 1);
        const Value made{next_++, a.buffer, a.offset + begin, n};
        body_ << alias_text(made) << " = aten.slice.Tensor(%" << a.id << ", 0, " << begin << ", " << begin + n
              << ", 1)\n";
        values_.push_back(made);
        return;
      }
      case 2:
      case 3: {                     // in-place op
        if (overlap(a, b)) return;  // an error in LibTorch
        const Value made{next_++, a.buffer, a.offset, a.n};
        const bool add = below(2) == 0;
        body_ << alias_text(made) << " = aten." << (add ? "add_.Tensor(%" : "copy_(%") << a.id << "!, %" << b.id
              << (add ? ", 1)\n" : ", false)\n");
        values_.push_back(made);
        return;
      }
      case 4: {
        if (a.n + b.n > 64) return;
        const Value made{next_++, buffers_++, 0, a.n + b.n};
        body_ << "%" << made.id << ": f32[" << made.n << "] = aten.cat([%" << a.id << ", %" << b.id << "], 0)\n";
        values_.push_back(made);
        return;
      }
      default: {
        const Value made{next_++, buffers_++, 0, a.n};
        body_ << "%" << made.id << ": f32[" << made.n << "] = aten.";
        below(3) ? body_ << "mul.Tensor(%" << a.id << ", %" << b.id << ")\n" : body_ << "neg(%" << a.id << ")\n";
        values_.push_back(made);
      }
    }
  }

  std::mt19937 random_;
  std::ostringstream body_;
  std::vector<Value> values_;
  int next_ = 0, buffers_ = 0;
};

TEST_F(Codegen, RandomProgramsAreBitwiseEqual) {
  for (unsigned seed = 0; seed < 2; seed++) {
    auto text = RandomProgram(seed).text(120);
    // Seed 0 returns all values. Seed 1 returns every fifth, so that the others can become variables.
    std::string few;
    std::istringstream in(text);
    int returns = 0;
    for (std::string line; std::getline(in, line);)
      if (!line.starts_with("return") || returns++ % 5 == 0) few += line + "\n";
    SCOPED_TRACE(text);
    expect_same_as_aten(seed == 0 ? text : few, {torch::randn({24}), torch::randn({24}), torch::randn({24})});
  }
}

}  // namespace
}  // namespace tessera::compiler
