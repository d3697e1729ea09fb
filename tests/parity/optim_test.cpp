// Compares optimizers, clipping and schedulers with PyTorch's, on the same parameters and gradients. Results are
// bit-equal, except where a case has a tolerance.
#include "run_python.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/schedulers.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/assert_close.h"

#include <torch/torch.h>

#include <functional>

namespace tessera::parity {
namespace {

using namespace optim;
using testing::close;

constexpr int64_t kSteps = 5;
const std::vector<std::vector<int64_t>> kShapes = {{5, 7}, {33}, {}, {2, 3, 4}, {19, 3}};

struct OptimCase {
  std::string options;  // for Python, JSON
  std::function<std::unique_ptr<Optimizer>(Tensors first, Tensors second)> make;
  at::ScalarType dtype = at::kFloat;
  double tolerance = 0;  // relative
};

// Two groups; the second has twice the learning rate.
template <class Kind>
auto maker(typename Kind::Options options) {
  return [=](Tensors first, Tensors second) -> std::unique_ptr<Optimizer> {
    auto faster = options;
    faster.lr = options.lr.is_tensor() ? LearningRate(options.lr.tensor() * 2) : LearningRate(options.lr.number() * 2);
    return std::make_unique<Kind>(std::vector<typename Kind::Group>{{first, options}, {second, faster}});
  };
}

// tensor_lr in SGD: we round lr * g and then the sum. PyTorch reads lr on the host and rounds once.
std::map<std::string, OptimCase> make_cases() {
  std::map<std::string, OptimCase> cases = {
      {"sgd", {R"("kind": "SGD", "lr": 0.1)", maker<SGD>({.lr = 0.1})}},
      {"sgd tensor lr",
       {R"("kind": "SGD", "lr": 0.1, "tensor_lr": true)", maker<SGD>({.lr = torch::tensor(0.1)}), at::kFloat, 1e-5}},
      {"sgd maximize decay",
       {R"("kind": "SGD", "lr": 0.1, "maximize": true, "weight_decay": 0.2)",
        maker<SGD>({.lr = 0.1, .weight_decay = 0.2, .maximize = true})}},
      {"sgd bf16",
       {R"("kind": "SGD", "lr": 0.1, "momentum": 0.9, "dtype": "bfloat16")", maker<SGD>({.lr = 0.1, .momentum = 0.9}),
        at::kBFloat16}},
      {"adam bf16", {R"("kind": "Adam", "lr": 0.1, "dtype": "bfloat16")", maker<Adam>({.lr = 0.1}), at::kBFloat16}},
      {"adam bf16 all",
       {R"("kind": "Adam", "lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.1, "dtype": "bfloat16")",
        maker<Adam>({.lr = 0.1, .betas = {0.8, 0.9}, .eps = 1e-3, .weight_decay = 0.1}), at::kBFloat16}},
      {"adamw bf16 fused",
       {R"("kind": "AdamW", "lr": 0.1, "dtype": "bfloat16", "fused": true)", maker<AdamW>({.lr = 0.1, .fused = true}),
        at::kBFloat16}},
      {"adam double",
       {R"("kind": "Adam", "lr": 0.1, "dtype": "float64")", maker<Adam>({.lr = 0.1}), at::kDouble, 1e-14}},
      {"adamw tensor lr",
       {R"("kind": "AdamW", "lr": 0.1, "tensor_lr": true)", maker<AdamW>({.lr = torch::tensor(0.1)})}},
      {"adamw tensor lr fused",
       {R"("kind": "AdamW", "lr": 0.1, "tensor_lr": true, "fused": true)",
        maker<AdamW>({.lr = torch::tensor(0.1), .fused = true})}},
      {"rmsprop", {R"("kind": "RMSprop", "lr": 0.03)", maker<RMSprop>({.lr = 0.03})}},
      {"rmsprop loop",
       {R"("kind": "RMSprop", "lr": 0.03, "alpha": 0.9, "eps": 1e-4, "weight_decay": 0.1, "maximize": true,
           "foreach": false)",
        maker<RMSprop>(
            {.lr = 0.03, .alpha = 0.9, .eps = 1e-4, .weight_decay = 0.1, .maximize = true, .foreach = false})}},
      {"rmsprop centered",
       {R"("kind": "RMSprop", "lr": 0.03, "centered": true)", maker<RMSprop>({.lr = 0.03, .centered = true})}},
      {"rmsprop momentum",
       {R"("kind": "RMSprop", "lr": 0.03, "momentum": 0.9, "foreach": true)",
        maker<RMSprop>({.lr = 0.03, .momentum = 0.9, .foreach = true})}},
      {"rmsprop momentum centered",
       {R"("kind": "RMSprop", "lr": 0.03, "momentum": 0.9, "centered": true)",
        maker<RMSprop>({.lr = 0.03, .momentum = 0.9, .centered = true})}},
      {"rmsprop tensor lr",
       {R"("kind": "RMSprop", "lr": 0.03, "tensor_lr": true)", maker<RMSprop>({.lr = torch::tensor(0.03)}), at::kFloat,
        1e-5}},
      {"rmsprop bf16",
       {R"("kind": "RMSprop", "lr": 0.03, "momentum": 0.9, "dtype": "bfloat16")",
        maker<RMSprop>({.lr = 0.03, .momentum = 0.9}), at::kBFloat16}},
      {"adagrad bf16",
       {R"("kind": "Adagrad", "lr": 0.1, "dtype": "bfloat16")", maker<Adagrad>({.lr = 0.1}), at::kBFloat16}},
      {"adagrad tensor lr",
       {R"("kind": "Adagrad", "lr": 0.1, "tensor_lr": true)", maker<Adagrad>({.lr = torch::tensor(0.1)})}},
  };
  const struct {
    const char* name;
    const char* text;
    std::optional<bool> foreach;
    bool fused;
  } variants[] = {{" loop", R"(, "foreach": false)", false, false},
                  {" foreach", R"(, "foreach": true)", true, false},
                  {" fused", R"(, "fused": true)", {}, true}};
  for (const auto& variant : variants) {
    const auto add = [&](const std::string& name, const std::string& text, auto make) {
      cases.emplace(name + variant.name, OptimCase{text + variant.text, make});
    };
    add("sgd momentum", R"("kind": "SGD", "lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01)",
        maker<SGD>({.lr = 0.1,
                    .momentum = 0.9,
                    .dampening = 0.3,
                    .weight_decay = 0.01,
                    .foreach = variant.foreach,
                    .fused = variant.fused}));
    add("sgd nesterov", R"("kind": "SGD", "lr": 0.1, "momentum": 0.9, "nesterov": true)",
        maker<SGD>({.lr = 0.1, .momentum = 0.9, .nesterov = true, .foreach = variant.foreach, .fused = variant.fused}));
    add("adam", R"("kind": "Adam", "lr": 0.03)",
        maker<Adam>({.lr = 0.03, .foreach = variant.foreach, .fused = variant.fused}));
    add("adam all", R"("kind": "Adam", "lr": 0.03, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1,
                       "amsgrad": true, "maximize": true)",
        maker<Adam>({.lr = 0.03,
                     .betas = {0.8, 0.95},
                     .eps = 1e-6,
                     .weight_decay = 0.1,
                     .amsgrad = true,
                     .maximize = true,
                     .foreach = variant.foreach,
                     .fused = variant.fused}));
    add("adagrad", R"("kind": "Adagrad", "lr": 0.1)",
        maker<Adagrad>({.lr = 0.1, .foreach = variant.foreach, .fused = variant.fused}));
    add("adagrad all", R"("kind": "Adagrad", "lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1,
                          "initial_accumulator_value": 0.3, "eps": 1e-6, "maximize": true)",
        maker<Adagrad>({.lr = 0.1,
                        .lr_decay = 0.2,
                        .weight_decay = 0.1,
                        .initial_accumulator_value = 0.3,
                        .eps = 1e-6,
                        .maximize = true,
                        .foreach = variant.foreach,
                        .fused = variant.fused}));
    add("adamw", R"("kind": "AdamW", "lr": 0.03)",
        maker<AdamW>({.lr = 0.03, .foreach = variant.foreach, .fused = variant.fused}));
    add("adamw amsgrad", R"("kind": "AdamW", "lr": 0.03, "weight_decay": 0.3, "amsgrad": true)",
        maker<AdamW>(
            {.lr = 0.03, .weight_decay = 0.3, .amsgrad = true, .foreach = variant.foreach, .fused = variant.fused}));
  }
  return cases;
}
const auto& cases() {
  static const auto all = make_cases();
  return all;
}
const std::vector<std::string> kNorms = {"1", "2", "3", "inf"};

const Message& request() {
  static const Message made = [] {
    torch::manual_seed(11);
    Message m;
    for (size_t i = 0; i < kShapes.size(); i++) {
      m.tensors[c10::str("p", i)] = torch::randn(kShapes[i]);
      for (int64_t step = 0; step < kSteps; step++) m.tensors[c10::str("g", step, ".", i)] = torch::randn(kShapes[i]);
    }
    std::string text = "{";
    for (const auto& [name, one] : cases())
      text += (text.size() > 1 ? ", \"" : "\"") + name + "\": {" + one.options + "}";
    m.texts["cases"] = text + "}";
    m.texts["norms"] = R"(["1", "2", "3", "inf"])";
    return m;
  }();
  return made;
}
const Response& pytorch() {
  static const auto response = run_python("optim.py", request());
  return response;
}

Tensors make_parameters(at::ScalarType dtype = at::kFloat) {
  Tensors all;
  for (size_t i = 0; i < kShapes.size(); i++)
    all.push_back(request().tensors.at(c10::str("p", i)).to(dtype, false, true).requires_grad_());
  return all;
}
torch::Tensor gradient(int64_t step, size_t i) { return request().tensors.at(c10::str("g", step, ".", i)).clone(); }

std::string differs(const at::Tensor& ours, const at::Tensor& theirs, double tolerance) {
  if (tolerance > 0) return close(ours, theirs, {tolerance, tolerance});
  return ours.scalar_type() == theirs.scalar_type() && torch::equal(ours, theirs)
             ? ""
             : c10::str("bits differ: ", close(ours, theirs, {0, 0}));
}

TEST(OptimParity, Optimizers) {
  SKIP_WITHOUT_PYTHON(pytorch());
  for (const auto& [name, one] : cases()) {
    SCOPED_TRACE(name);
    auto params = make_parameters(one.dtype);
    const auto half = params.begin() + static_cast<int64_t>(params.size() / 2);
    const auto optimizer = one.make({params.begin(), half}, {half, params.end()});
    // PyTorch's crashes without one.
    const bool all_have_gradients = optimizer->kind() == "SGD" && optimizer->is_fused(0);
    for (int64_t step = 0; step < kSteps; step++) {
      for (size_t i = 0; i < params.size(); i++)
        params[i].mutable_grad() = i + 1 == params.size() && step < 2 && !all_have_gradients
                                       ? torch::Tensor()
                                       : gradient(step, i).to(one.dtype);
      optimizer->step();
    }
    for (size_t i = 0; i < params.size(); i++) {
      const auto key = c10::str(name, ".", i);
      EXPECT_EQ(differs(params[i].detach(), pytorch().tensors.at(key), one.tolerance), "") << key;
      for (const auto& [entry, value] : optimizer->state(params[i]))
        EXPECT_EQ(differs(value, pytorch().tensors.at(key + "." + entry), one.tolerance), "") << key << " " << entry;
    }
  }
}

TEST(OptimParity, Clipping) {
  SKIP_WITHOUT_PYTHON(pytorch());
  auto params = make_parameters();
  for (const auto& norm : kNorms) {
    for (size_t i = 0; i < params.size(); i++) params[i].mutable_grad() = gradient(0, i);
    const auto total = clip_grad_norm_(params, 0.5, {.norm_type = std::stod(norm)});
    EXPECT_EQ(differs(total, pytorch().tensors.at("norm " + norm), 0), "") << norm;
    for (size_t i = 0; i < params.size(); i++)
      EXPECT_EQ(differs(params[i].grad(), pytorch().tensors.at(c10::str("norm ", norm, ".", i)), 0), "") << norm;
  }
  clip_grad_value_(params, 0.01);
  for (size_t i = 0; i < params.size(); i++)
    EXPECT_EQ(differs(params[i].grad(), pytorch().tensors.at(c10::str("value.", i)), 0), "");
}

TEST(OptimParity, Schedulers) {
  SKIP_WITHOUT_PYTHON(pytorch());
  using Made = std::unique_ptr<LRScheduler>;
  const std::map<std::string, std::function<Made(Optimizer&)>> makers = {
      {"StepLR", [](Optimizer& o) -> Made { return std::make_unique<StepLR>(o, 7, 0.3); }},
      {"MultiStepLR",
       [](Optimizer& o) -> Made {
         return std::make_unique<MultiStepLR>(o, std::vector<int64_t>{3, 20, 20, 41}, 0.7);
       }},
      {"ConstantLR", [](Optimizer& o) -> Made { return std::make_unique<ConstantLR>(o, 0.25, 9); }},
      {"LinearLR", [](Optimizer& o) -> Made { return std::make_unique<LinearLR>(o, 0.1, 0.9, 13); }},
      {"ExponentialLR", [](Optimizer& o) -> Made { return std::make_unique<ExponentialLR>(o, 0.93); }},
      {"CosineAnnealingLR", [](Optimizer& o) -> Made { return std::make_unique<CosineAnnealingLR>(o, 20, 0.003); }},
      {"LambdaLR",
       [](Optimizer& o) -> Made {
         return std::make_unique<LambdaLR>(o, [](int64_t epoch) { return 1 / (1 + static_cast<double>(epoch)); });
       }},
      {"SequentialLR",
       [](Optimizer& o) -> Made {
         std::vector<std::shared_ptr<LRScheduler>> parts = {std::make_shared<LinearLR>(o, 0.1, 1.0, 7),
                                                            std::make_shared<CosineAnnealingLR>(o, 20, 0.01),
                                                            std::make_shared<ExponentialLR>(o, 0.9)};
         return std::make_unique<SequentialLR>(o, parts, std::vector<int64_t>{7, 30});
       }},
  };
  for (const auto& [name, make] : makers) {
    SCOPED_TRACE(name);
    SGD optimizer({{{torch::zeros(2)}, {.lr = 0.1}}, {{torch::zeros(2)}, {.lr = 0.3}}});
    const auto scheduler = make(optimizer);
    auto seen = torch::empty({50, 2}, torch::kDouble);
    for (int64_t i = 0; i < 50; i++) {
      seen[i][0] = optimizer.lr(0);
      seen[i][1] = optimizer.lr(1);
      scheduler->step();
    }
    EXPECT_EQ(differs(seen, pytorch().tensors.at(name), 0), "");
  }
}

}  // namespace
}  // namespace tessera::parity
