// A compiled step in a file: saved in one process, it runs in another one without tracing and without a compiler, with
// the same bits. A file that is not for this process, and a step that no file can contain, are refused.
#include "tessera/base/detail/child_process.h"
#include "tessera/compile/api/compile.h"
#include "tessera/compile/detail/api/step_file.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/schedulers.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"

#include "captured_warnings.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace tessera {
namespace {

namespace fs = std::filesystem;
using compiler::codegen::KernelLibrary;

int64_t body_runs = 0;  // how often the C++ code of the step has run

struct SavedBatch {
  at::Tensor x, y;
  double weight = 1;  // an input of the program
  int64_t power = 2;  // a key
  friend void tessera_visit(SavedBatch& b, auto&& field) { field(b.x), field(b.y), field(b.weight), field(b.power); }
};

using SavedResult = std::tuple<at::Tensor, at::Tensor, double>;

const auto saved_train_step = [](auto& model, auto& opt, const SavedBatch& batch) {
  body_runs++;
  opt.zero_grad();
  const auto out = model->forward(batch.x);
  auto loss = ((out - batch.y).pow(static_cast<double>(batch.power)) * batch.weight).mean();
  loss.backward();
  opt.step();
  return SavedResult(loss, out.detach(), batch.weight);
};

nn::Sequential saved_model(double dropout = 0.25, int64_t hidden = 16) {
  torch::manual_seed(3);
  manual_seed(5);
  return nn::Sequential(nn::Linear(8, hidden), nn::GELU(), nn::LayerNorm(torch::nn::LayerNormOptions({hidden})),
                        nn::Dropout(dropout), nn::Linear(hidden, 4));
}

// Call i: rows of one data set, so that batches begin at other offsets.
SavedBatch saved_batch(int64_t i, int64_t rows = 6) {
  static const auto data = [] {
    auto generator = at::detail::createCPUGenerator(17);
    return torch::randn({64, 12}, generator);
  }();
  const auto part = data.narrow(0, i * rows, rows);
  return {part.narrow(1, 0, 8).contiguous(), data.narrow(0, i * rows, rows).narrow(1, 8, 4), 1.0 + 0.5 * double(i)};
}

CompileOptions with_file(const std::string& file) {
  return {.captures = Captures::None, .load = file.empty() ? std::nullopt : std::optional(file)};
}

// What five calls leave, with a learning rate that changes.
template <class Step>
Tensors five_calls(Step& step, const std::function<void(int, nn::Sequential&, optim::AdamW&)>& after = {}) {
  auto model = saved_model();
  optim::AdamW opt(model->parameters(), {.lr = 0.01, .fused = true});
  Tensors all;
  for (int i = 0; i < 5; i++) {
    opt.set_lr(0, 0.01 * (i + 1));
    const auto [loss, out, weight] = step(model, opt, saved_batch(i));
    for (const auto& t : {loss, out}) all.push_back(t.clone());
    all.push_back(torch::tensor(weight));
    if (after) after(i, model, opt);
  }
  for (const auto& p : model->parameters()) all.push_back(p.detach().clone()), all.push_back(p.grad().clone());
  return all;
}

void expect_equal_lists(const Tensors& found, const Tensors& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); i++) EXPECT_TRUE(at::equal(found[i], wanted[i])) << "tensor " << i;
}

class SavedStepFile : public ::testing::Test {
 protected:
  SavedStepFile() {
    std::string pattern = ::testing::TempDir() + "savedXXXXXX";
    folder_ = mkdtemp(pattern.data());
    file_ = (folder_ / "train.step").string();
  }
  ~SavedStepFile() override { fs::remove_all(folder_); }

  // Saves the step after its first call. Returns what the five calls leave.
  Tensors save() const {
    auto step = compile(saved_train_step, with_file(""));
    return five_calls(step, [&](int i, auto& model, auto& opt) {
      if (i == 0) step.save(file_, model, opt, saved_batch(0));
    });
  }
  std::string bytes() const {
    std::ifstream in(file_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void put_bytes(const std::string& bytes) const { std::ofstream(file_, std::ios::binary) << bytes; }

  fs::path folder_;
  std::string file_;
};

// The other process: TESSERA_SAVED_STEP is the file, and a file beside it has the tensors that are wanted. It has an
// empty kernel cache and no compiler.
TEST(SavedStepChild, Runs) {
  const char* file = std::getenv("TESSERA_SAVED_STEP");
  if (!file) return;
  Tensors wanted;
  torch::load(wanted, std::string(file) + ".wanted");
  auto step = compile(saved_train_step, with_file(file));
  expect_equal_lists(five_calls(step), wanted);
  EXPECT_EQ(body_runs, 0);
  EXPECT_EQ(KernelLibrary::builds(), 0);
  EXPECT_EQ(step.recompiles().size(), 0u);
  EXPECT_NE(step.executable().library(), nullptr);
  EXPECT_FALSE(step.report().empty());
}

TEST_F(SavedStepFile, RunsInAnotherProcessWithTheSameBits) {
  const auto wanted = save();
  torch::save(wanted, file_ + ".wanted");
  const auto filter = "--gtest_filter=SavedStepChild.Runs";
  const auto child = run_child(
      {"/usr/bin/env", "CXX=/nowhere", "PATH=/nowhere", "TESSERA_SAVED_STEP=" + file_,
       "TESSERA_CACHE_DIR=" + (folder_ / "cache").string(), fs::read_symlink("/proc/self/exe").string(), filter},
      ChildErrors::InOutput);
  EXPECT_EQ(child.exit_code, 0) << child.out;
}

TEST_F(SavedStepFile, ALoadedStepCanBeSavedAgain) {
  const auto wanted = save();
  auto step = compile(saved_train_step, with_file(file_));
  const auto again = (folder_ / "again.step").string();
  five_calls(step, [&](int, auto& model, auto& opt) { step.save(again, model, opt, saved_batch(0)); });
  auto other = compile(saved_train_step, with_file(again));
  body_runs = 0;
  expect_equal_lists(five_calls(other), wanted);
  EXPECT_EQ(body_runs, 0);
}

TEST_F(SavedStepFile, IsRefusedIfItIsDamagedOrOfAnotherUser) {
  save();
  const auto good = bytes();
  const auto load = [&] { compile(saved_train_step, with_file(file_)); };
  EXPECT_ERROR(UsageError, compile(saved_train_step, with_file(file_ + ".no")), "cannot read", "No such file");
  for (const size_t size : {size_t{0}, size_t{20}, good.size() / 2, good.size() - 1}) {
    put_bytes(good.substr(0, size));
    EXPECT_ERROR(UsageError, load(), file_);
  }
  put_bytes(good.substr(0, good.size() - 1));
  EXPECT_ERROR(UsageError, load(), "is truncated or altered", "save the step again");
  for (const size_t at : {size_t{40}, good.size() / 2, good.size() - 1}) {
    auto altered = good;
    altered[at] ^= 1;
    put_bytes(altered);
    EXPECT_ERROR(UsageError, load(), "its HMAC is not that of this user's key");
  }
  put_bytes(good);
  EXPECT_NO_THROW(load());
  const char* before = std::getenv("XDG_STATE_HOME");
  const auto kept = before ? std::optional<std::string>(before) : std::nullopt;
  setenv("XDG_STATE_HOME", (folder_ / "state").c_str(), 1);
  EXPECT_ERROR(UsageError, load(), "written by another user or on another machine");
  kept ? setenv("XDG_STATE_HOME", kept->c_str(), 1) : unsetenv("XDG_STATE_HOME");
}

TEST_F(SavedStepFile, IsRefusedIfItIsForOtherVersionsOrOptions) {
  save();
  const auto sections = compiler::read_step_file(file_);
  const auto made_for = compiler::section(sections, "made for");
  const auto with = [&](const std::string& from, const std::string& to) {
    auto other = sections;
    auto text = made_for;
    other["made for"] = text.replace(text.find(from), from.size(), to);
    compiler::write_step_file(file_, other);
    compile(saved_train_step, with_file(file_));
  };
  EXPECT_ERROR(UsageError, with("LibTorch ", "LibTorch 1."), "was made for LibTorch 1.", "this is LibTorch");
  EXPECT_ERROR(UsageError, with("Tessera ", "Tessera 9."), "was made for Tessera 9.");
  EXPECT_ERROR(UsageError, with("processor ", "processor Z80 "), "was made for processor Z80");
  compiler::write_step_file(file_, sections);
  EXPECT_ERROR(UsageError, compile(saved_train_step, {.codegen = false, .load = file_}), "codegen on", "codegen off");
  EXPECT_ERROR(UsageError, compile(saved_model(), {.load = file_}), "compile(module) has no saved form");
}

TEST_F(SavedStepFile, AnotherCallIsCompiledOrRefused) {
  save();
  auto model = saved_model();
  optim::AdamW opt(model->parameters(), {.lr = 0.01, .fused = true});
  const auto expect_refused = [&](const std::string& part, auto& m, auto& o, const SavedBatch& batch) {
    auto options = with_file(file_);
    options.recompile_limit = 0;
    auto step = compile(saved_train_step, options);
    EXPECT_ERROR(UsageError, step(m, o, batch), "is not for this call", part);
  };
  expect_refused("tensor argument 0: f32[5, 8]", model, opt, saved_batch(0, 5));
  auto cubed = saved_batch(0);
  cubed.power = 4;
  expect_refused("integer, bool or enum: 4", model, opt, cubed);
  model->eval();
  expect_refused("in eval mode", model, opt, saved_batch(0));
  model->train();
  auto dropout = saved_model(0.5), wide = saved_model(0.25, 32);
  optim::AdamW of_dropout(dropout->parameters(), {.fused = true}), of_wide(wide->parameters(), {.fused = true});
  expect_refused("Dropout(p=0.5", dropout, of_dropout, saved_batch(0));
  expect_refused("out_features=32", wide, of_wide, saved_batch(0));
  optim::AdamW decay(model->parameters(), {.weight_decay = 0.5, .fused = true});
  expect_refused("weight_decay 0.5", model, decay, saved_batch(0));
  {
    const c10::InferenceMode mode(false);
    const at::AutoGradMode off(false);
    expect_refused("grad mode is off", model, opt, saved_batch(0));
  }
  // Without that limit it is traced, with a warning; the program of the file still serves calls like the saved one.
  CapturedWarnings warnings;
  auto step = compile(saved_train_step, with_file(file_));
  body_runs = 0;
  step(model, opt, saved_batch(0, 5));
  EXPECT_GT(body_runs, 0);
  EXPECT_EQ(warnings.count("is not for this call"), 1u);
  EXPECT_EQ(step.recompiles().size(), 1u);
  body_runs = 0;
  step(model, opt, saved_batch(0));
  EXPECT_EQ(body_runs, 0);
  EXPECT_EQ(step.cache().size(), 2u);
}

// The second call traces, as that of any compiled step, and compares.
TEST_F(SavedStepFile, AnotherFunctionIsFound) {
  save();
  auto step = compile(
      [](auto& model, auto& opt, const SavedBatch& batch) {
        body_runs++;
        opt.zero_grad();
        const auto out = model->forward(batch.x);
        auto loss = ((out - batch.y).pow(static_cast<double>(batch.power)) * batch.weight).sum();
        loss.backward();
        opt.step();
        return SavedResult(loss, out.detach(), batch.weight);
      },
      {.load = file_});
  auto model = saved_model();
  optim::AdamW opt(model->parameters(), {.lr = 0.01, .fused = true});
  body_runs = 0;
  step(model, opt, saved_batch(0));
  EXPECT_EQ(body_runs, 0);
  EXPECT_ERROR(UsageError, step(model, opt, saved_batch(1)), "aten.sum");
}

TEST_F(SavedStepFile, WhatAFileCannotContain) {
  const auto x = torch::randn({3});
  const auto expect_refused = [&](const std::string& why, auto function, auto&... args) {
    auto step = compile(function, {.codegen = false, .captures = Captures::None});
    EXPECT_ERROR(UsageError, step.save(file_, args...), "no program is cached");
    step(args...);
    EXPECT_ERROR(UsageError, step.save(file_, args...), "save: ", why);
    EXPECT_FALSE(fs::exists(file_));
  };
  const auto captured = torch::randn({3});
  expect_refused(
      "not among its arguments", [captured](const at::Tensor& t) { return t * captured; }, x);
  expect_refused(
      "lengths",
      [](const at::Tensor& t) {
        return Tensors{t + 1, t + 2};
      },
      x);
  expect_refused(
      "a parameter", [](const nn::Linear& m) { return m->weight; }, *std::make_unique<nn::Linear>(3, 3));
  nn::Linear model(3, 3);
  optim::SGD opt(model->parameters(), {.lr = 0.1});
  optim::StepLR scheduler(opt, 1);
  const auto train = [&scheduler](nn::Linear& m, optim::SGD& o, const at::Tensor& t) {
    o.zero_grad();
    m(t).sum().backward();
    o.step();
    scheduler.step();
  };
  expect_refused("a scheduler", train, model, opt, x);
  // Tensors that the step has made on the host are in the file.
  auto step = compile(
      [](const at::Tensor& t) {
        return t * torch::tensor({1.0f, 2.0f, 3.0f});
      },
      {.codegen = false, .captures = Captures::None});
  step(x);
  step.save(file_, x);
  auto loaded =
      compile([](const at::Tensor& t) { return t * 2; }, {.codegen = false, .captures = Captures::None, .load = file_});
  EXPECT_TRUE(at::equal(loaded(x), x * torch::tensor({1.0f, 2.0f, 3.0f})));
}

}  // namespace
}  // namespace tessera
