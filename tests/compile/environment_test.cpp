// Random environments of a compiled step. A step reads some items of its environment: parameters, options of modules,
// arguments of every type, thread state, captured variables. Between calls, items change. The same step runs in eager
// mode beside it, in an environment with the same changes. Results, memory and gradients must have equal bits, or
// compile() refuses the step with a message from kRefusals. A failure prints the items, the changes and the seed.
// TESSERA_SOAK=1 draws twenty-five times as many sequences.
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/detail/soak.h"
#include "tessera/testing/ranks.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <random>
#include <sstream>

namespace tessera {
namespace {

// A class of the user inside of the model.
struct EnvironmentPartImpl : torch::nn::Module {
  bool halved = false;  // in the padding after the members of torch::nn::Module
  int64_t times = 2;
  std::string reduction = "sum";
  std::vector<double> weights{0.5};
  at::Tensor forward(const at::Tensor& x) const {
    const auto y = x * static_cast<double>(times) * (halved ? 0.5 : 1);
    return reduction == "sum" ? y.sum() : y.mean();
  }
  at::Tensor weighted(const at::Tensor& x) const { return (x * weights[0]).sum(); }
};
TORCH_MODULE(EnvironmentPart);

// The model of an environment. It is not in a holder, so a new one can be created at the address of the old one.
struct EnvironmentNet : torch::nn::Module {
  explicit EnvironmentNet(const DeviceMesh& mesh) {
    fc = register_module("fc", nn::Linear(3, 3));
    body = register_module("body", nn::Linear(3, 3));
    drop = register_module("drop", nn::Dropout(0.25));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({3})));
    bag = register_module("bag", std::make_shared<torch::nn::Module>());
    part = register_module("part", EnvironmentPart());
    row = register_parameter("row", torch::randn({4}));
    matrix = register_parameter("matrix", torch::randn({2, 3}));
    placed = register_parameter("placed", distribute_tensor(torch::randn({4}), mesh, {Shard(0)}), false);
    state = register_buffer("state", torch::randn({3}));
  }
  nn::Linear fc{nullptr}, body{nullptr};
  nn::Dropout drop{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  std::shared_ptr<torch::nn::Module> bag;
  EnvironmentPart part{nullptr};
  at::Tensor row, matrix, placed, state;
  double scale = 0.5;
};

enum class EnvironmentMode { Sum, Mean };

struct EnvironmentBatch {
  at::Tensor x;
  std::optional<at::Tensor> mask;
  double gain = 0.5;
  int64_t repeats = 2;
  EnvironmentMode mode = EnvironmentMode::Sum;
  friend void tessera_visit(EnvironmentBatch& b, auto&& field) {
    field(b.x), field(b.mask), field(b.gain), field(b.repeats), field(b.mode);
  }
};

// What a step can read. Two of them are created equal: one for eager mode, one for the compiled step.
struct Environment {
  explicit Environment(const DeviceMesh& on, uint64_t seed) : mesh(on) {
    torch::manual_seed(seed);
    batch.x = torch::randn({2, 3});
    other = torch::randn({2, 3});
    z = torch::randn({3}, at::kComplexFloat);
    first = {torch::randn({3}), torch::randn({3})};
    second = {torch::randn({3})};
    by_name = {{"a", torch::randn({3})}, {"b", torch::randn({3})}};
    captured_tensor = torch::randn({3});
    group_tensor = torch::randn({3});
    captured_model = nn::Linear(3, 3);
    captured_drop = nn::Dropout(0.25);
    renew();
  }
  // A new model and a new optimizer, at the addresses of the old ones.
  void renew() {
    optimizer.reset();
    model.reset();
    hook.reset();
    model.emplace(mesh);
    renew_optimizer();
  }
  void renew_optimizer() {
    Tensors parameters;
    for (const auto& p : model->parameters())
      if (!is_dtensor(p)) parameters.push_back(p);
    optimizer.emplace(parameters, optim::SGD::Options{.lr = 0.1, .momentum = 0.9});
  }

  DeviceMesh mesh;
  std::optional<EnvironmentNet> model;
  std::optional<optim::SGD> optimizer;
  EnvironmentBatch batch;
  at::Tensor other, z;
  std::tuple<double, int64_t> pair{0.5, 2};
  std::vector<double> numbers{0.5, 0.25};
  std::optional<double> maybe = 0.5;
  std::map<std::string, double> coefficients{{"a", 0.5}, {"b", 0.25}};
  c10::Scalar scalar = 0.5;
  c10::TensorOptions options = at::kFloat;
  std::string reduction = "sum";
  Tensors first, second;
  std::map<std::string, at::Tensor> by_name;
  double beta = 0.5;
  int64_t count = 2;
  bool flag = false;

  double captured_number = 0.5;
  at::Tensor captured_tensor;
  at::Tensor group_tensor;  // a parameter of the optimizer alone
  std::vector<double> captured_list{0.5};
  nn::Linear captured_model{nullptr};
  nn::Dropout captured_drop{nullptr};
  std::optional<unsigned> hook;  // on a gradient of the model

  // Thread state, set around each call.
  bool grad_mode = true, inference = false, autocast = false, autocast_cache = true, deterministic = false;
  c10::ScalarType autocast_dtype = at::kBFloat16, default_dtype = at::kFloat;
};

// What the items read: the arguments of a call, and the environment for captured variables.
struct View {
  EnvironmentNet* model;
  optim::SGD& optimizer;
  EnvironmentBatch& batch;
  at::Tensor &other, &z;
  const std::tuple<double, int64_t>& pair;
  const std::vector<double>& numbers;
  const std::optional<double>& maybe;
  const std::map<std::string, double>& coefficients;
  const c10::Scalar& scalar;
  const c10::TensorOptions& options;
  const std::string& reduction;
  const Tensors &first, &second;
  const std::map<std::string, at::Tensor>& by_name;
  double beta;
  int64_t count;
  bool flag;
  Environment& captured;
};

// Calls step(arguments...) with the arguments of an environment.
template <class F>
Tensors call_with(Environment& e, F&& step) {
  return step(*e.model, *e.optimizer, e.batch, e.other, e.z, e.pair, e.numbers, e.maybe, e.coefficients, e.scalar,
              e.options, e.reduction, e.first, e.second, e.by_name, e.beta, e.count, e.flag);
}

// Sets the thread state of an environment while alive.
class ThreadState {
 public:
  explicit ThreadState(const Environment& e) : inference_(e.inference), grad_(e.grad_mode) {
    at::autocast::set_autocast_enabled(at::kCPU, e.autocast);
    at::autocast::set_autocast_dtype(at::kCPU, e.autocast_dtype);
    at::autocast::set_autocast_cache_enabled(e.autocast_cache);
    at::set_default_dtype(c10::scalarTypeToTypeMeta(e.default_dtype));
    at::globalContext().setDeterministicAlgorithms(e.deterministic, false);
  }
  ~ThreadState() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(true);
    at::autocast::clear_cache();
    at::set_default_dtype(caffe2::TypeMeta::Make<float>());
    at::globalContext().setDeterministicAlgorithms(false, false);
  }
  ThreadState(const ThreadState&) = delete;

 private:
  c10::InferenceMode inference_;  // sets the grad mode too
  at::AutoGradMode grad_;
};

using Random = std::mt19937;
int64_t below(Random& random, int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
double other_number(Random& random, double now) {
  const double next = static_cast<double>(1 + below(random, 7)) * 0.25;
  return next == now ? next + 2 : next;
}
at::Tensor new_leaf(const at::Tensor& value) { return value.detach().clone().requires_grad_(true); }

// One item of an environment: how a step reads it, and a change of it. Changes draw the same
// random numbers in both environments.
struct EnvironmentItem {
  const char* name;
  at::Tensor (*read)(const View& e);
  void (*change)(Environment& e, Random& random);
};

#define READ(expression)            \
  [](const View& e) -> at::Tensor { \
    (void)e;                        \
    return expression;              \
  }
#define CHANGE(statements)             \
  [](Environment& e, Random& random) { \
    (void)random;                      \
    const at::NoGradGuard no_grad;     \
    statements;                        \
  }

const EnvironmentItem kItems[] = {
    // Parameters and buffers.
    {"parameter dtype", READ(e.model->fc(e.batch.x.to(e.model->fc->weight.scalar_type())).sum().to(at::kFloat)),
     CHANGE(const auto dtype = e.model->fc->weight.scalar_type() == at::kFloat ? at::kDouble : at::kFloat;
            e.model->fc->to(dtype); for (auto& p
                                         : e.model->fc->parameters()) p.mutable_grad()
                                        .reset();
            e.renew_optimizer())},
    {"parameter sizes", READ(e.model->row.pow(2).sum()),
     CHANGE(e.model->row.mutable_grad().reset(); e.model->row.set_data(torch::randn({3 + below(random, 3)}));
            e.renew_optimizer())},
    {"parameter strides", READ(e.model->matrix.pow(2)[1].sum()),
     CHANGE(e.model->matrix.mutable_grad().reset();
            e.model->matrix.set_data(e.model->matrix.is_contiguous() ? torch::randn({3, 2}).t() : torch::randn({2, 3}));
            e.renew_optimizer())},
    {"requires_grad of a parameter", READ(e.model->row.pow(2).sum() + e.model->matrix.sum()),
     CHANGE(e.model->row.mutable_grad().reset(); e.model->row.requires_grad_(!e.model->row.requires_grad());
            e.renew_optimizer())},
    {"placement of a parameter", READ(e.model->placed * 2),
     CHANGE(const bool sharded = DTensor(e.model->placed).placements()[0] == Placement(Shard(0));
            e.model->placed.set_data(distribute_tensor(torch::randn({4}), e.mesh,
                                                       {sharded ? Placement(Replicate()) : Placement(Shard(0))})))},
    {"buffer replaced", READ(e.model->state.mul(3).sum()),
     CHANGE(e.model->named_buffers()["state"].set_data(
         torch::randn({3}).to(below(random, 2) ? at::kDouble : at::kFloat)))},
    {"neg bit of a buffer", READ(e.model->state.mul(2).sum()),
     CHANGE(e.model->state.unsafeGetTensorImpl()->_set_neg(!e.model->state.is_neg()))},
    {"new model and optimizer at the same address", READ(e.model->body(e.batch.x).sum()), CHANGE(e.renew())},
    {"new optimizer at the same address", READ(e.model->body(e.batch.x).pow(2).sum()), CHANGE(e.renew_optimizer())},
    {"parameters of a module", READ([&] {
       auto sum = torch::zeros({});
       for (const auto& p : e.model->bag->parameters()) sum = sum + p.sum();
       return sum;
     }()),
     CHANGE(
         e.model->bag->register_parameter("p" + std::to_string(e.model->bag->parameters().size()), torch::randn({2})))},
    {"parameters of an optimizer group", READ(e.model->row.sum() + e.captured.group_tensor.sum()),
     CHANGE(e.group_tensor = new_leaf(torch::randn({3}));
            e.optimizer->add_param_group({{e.group_tensor}, {.lr = 0.2, .momentum = 0.5}}))},
    {"submodule replaced", READ(e.model->body(e.batch.x).sum()),
     CHANGE(e.model->body = e.model->replace_module("body", nn::Linear(3, 3)); e.renew_optimizer())},
    {"submodule of another class", READ([&] {
       auto sum = torch::zeros({});
       for (const auto& child : e.model->bag->children())
         sum = sum + (child->as<torch::nn::ReLU>() ? e.batch.x.relu() : e.batch.x.tanh()).sum();
       return sum;
     }()),
     CHANGE(const auto name = "c" + std::to_string(e.model->bag->children().size());
            if (below(random, 2)) e.model->bag->register_module(name, torch::nn::ReLU());
            else e.model->bag->register_module(name, torch::nn::Tanh()))},
    {"hook added or removed", READ(e.model->fc(e.batch.x.to(e.model->fc->weight.scalar_type())).sum().to(at::kFloat)),
     CHANGE(register_forward_hook(*e.model->fc,
                                  [by = other_number(random, 0)](Module&, const Tensors&, const Tensors& out) {
                                    return Tensors{out[0] * by};
                                  }))},
    {"training mode", READ(e.model->drop(e.batch.x).sum()),
     CHANGE(e.model->drop->train(!e.model->drop->is_training()))},
    {"dropout p", READ(e.model->drop(e.batch.x).sum()), CHANGE(e.model->drop->options.p(other_number(random, 0) / 4))},
    {"eps of a layer norm", READ(e.model->norm(e.batch.x).pow(2).sum()),
     CHANGE(e.model->norm->options.eps(other_number(random, 0)))},
    {"number in a module", READ((e.batch.x * e.model->scale).sum()),
     CHANGE(e.model->scale = other_number(random, e.model->scale))},
    {"bool in a submodule", READ(e.model->part(e.batch.x)), CHANGE(e.model->part->halved = !e.model->part->halved)},
    {"integer in a submodule", READ(e.model->part(e.batch.x)),
     CHANGE(e.model->part->times = 1 + (e.model->part->times + below(random, 2)) % 4)},
    {"string in a submodule", READ(e.model->part(e.batch.x)),
     CHANGE(e.model->part->reduction = e.model->part->reduction == "sum" ? "mean" : "sum")},
    {"submodule of an own class replaced", READ(e.model->part(e.batch.x)),
     CHANGE(e.model->part = e.model->replace_module("part", EnvironmentPart());
            e.model->part->times = 3 + below(random, 3))},
    {"memory of a parameter", READ(e.model->row.pow(2).sum()),
     CHANGE(e.model->row.set_data(torch::randn(e.model->row.sizes())))},
    {"hook on a gradient", READ(e.model->row.pow(2).sum()),
     CHANGE(if (!e.model->row.requires_grad()) return; if (e.hook) e.model->row.remove_hook(*e.hook);
            const double by = other_number(random, 0);
            e.hook = e.model->row.register_hook([by](const at::Tensor& g) { return g * by; }))},
    {"gradient set outside", READ(e.model->matrix.pow(2).sum()),
     CHANGE(auto& g = e.model->matrix.mutable_grad(); if (below(random, 2)) g.reset();
            else g = below(random, 2) ? torch::randn(e.model->matrix.sizes()) : torch::randn({3, 2}).t())},
    // Optimizers.
    {"learning rate", READ(e.model->row.pow(2).sum()), CHANGE(e.optimizer->set_lr(0, other_number(random, 0)))},
    {"momentum", READ(e.model->row.pow(2).sum()),
     CHANGE(auto o = e.optimizer->group_options(0); o.momentum = other_number(random, o.momentum) / 4;
            e.optimizer->set_group_options(0, o))},
    {"dampening", READ(e.model->row.pow(2).sum()),
     CHANGE(auto o = e.optimizer->group_options(0); o.dampening = other_number(random, o.dampening) / 4;
            e.optimizer->set_group_options(0, o))},
    // Arguments.
    {"argument expanded", READ(e.other.pow(2).sum()),
     CHANGE(e.other = below(random, 2) ? torch::randn({1, 3}).expand({2, 3}) : torch::randn({2, 3}))},
    {"storage offset of an argument", READ(e.other.pow(2).sum()),
     CHANGE(e.other = torch::randn({4, 3}).narrow(0, below(random, 3), 2))},
    {"argument of no elements", READ(e.other.sum() + 1), CHANGE(e.other = torch::randn({below(random, 2), 3}))},
    {"undefined argument", READ(e.z.defined() ? at::real(e.z).sum() : e.batch.x.sum()),
     CHANGE(e.z = e.z.defined() ? at::Tensor() : torch::randn({3}, at::kComplexFloat))},
    {"history of an argument", READ(e.other.pow(2).sum() + e.model->row.sum()),
     CHANGE(const at::AutoGradMode on(true);
            e.other = (e.captured_model->weight * (1 + below(random, 3))).narrow(0, 0, 2))},
    {"argument sizes", READ(e.other.pow(2).sum()), CHANGE(e.other = torch::randn({2 + below(random, 3), 3}))},
    {"argument strides", READ(e.other.pow(2)[1].sum()), CHANGE(e.other = torch::randn({3, 2}).t())},
    {"argument dtype", READ(e.other.mul(2)),
     CHANGE(e.other = torch::randn({2, 3}, below(random, 2) ? at::kDouble : at::kFloat))},
    {"requires_grad of an argument", READ(e.other.pow(2).sum() + e.model->row.sum()),
     CHANGE(e.other = torch::randn({2, 3}); e.other.requires_grad_(below(random, 2) == 1))},
    {"alias of an argument", READ(e.batch.x.add_(1); e.other.pow(2).sum()),
     CHANGE(e.other = below(random, 2) ? e.batch.x.detach() : torch::randn({2, 3}))},
    {"alias of a parameter", READ([&] {
       const at::NoGradGuard no_grad;
       e.model->matrix.mul_(0.5);
       return e.other.sum();
     }()),
     CHANGE(e.other = below(random, 2) ? e.model->matrix.detach() : torch::randn({2, 3}))},
    {"neg bit of an argument", READ(e.other.mul(2).sum()), CHANGE(e.other = at::_neg_view(torch::randn({2, 3})))},
    {"conj bit of an argument", READ(at::imag(e.z.mul(2)).sum()),
     CHANGE(e.z =
                below(random, 2) ? torch::randn({3}, at::kComplexFloat).conj() : torch::randn({3}, at::kComplexFloat))},
    {"optional tensor", READ(e.batch.mask ? (e.batch.x** e.batch.mask).sum() : e.batch.x.sum()),
     CHANGE(if (e.batch.mask) e.batch.mask.reset(); else e.batch.mask = torch::randn({2, 3}))},
    {"number in a struct", READ((e.batch.x * e.batch.gain).sum()),
     CHANGE(e.batch.gain = other_number(random, e.batch.gain))},
    {"integer in a struct", READ(e.batch.x.repeat({1, e.batch.repeats}).sum(1)),
     CHANGE(e.batch.repeats = 1 + (e.batch.repeats + below(random, 2)) % 4)},
    {"enum in a struct", READ(e.batch.mode == EnvironmentMode::Sum ? e.batch.x.sum() : e.batch.x.mean()),
     CHANGE(e.batch.mode = e.batch.mode == EnvironmentMode::Sum ? EnvironmentMode::Mean : EnvironmentMode::Sum)},
    {"number in a tuple", READ((e.batch.x * std::get<0>(e.pair)).sum()),
     CHANGE(std::get<0>(e.pair) = other_number(random, std::get<0>(e.pair)))},
    {"integer in a tuple", READ(e.batch.x.unsqueeze(0).expand({std::get<1>(e.pair), 2, 3}).sum()),
     CHANGE(std::get<1>(e.pair) = 1 + (std::get<1>(e.pair) + below(random, 2)) % 4)},
    {"number in a vector", READ((e.batch.x * e.numbers.back()).sum()),
     CHANGE(e.numbers.back() = other_number(random, e.numbers.back()))},
    {"length of a vector", READ(e.batch.x.sum() * static_cast<double>(e.numbers.size())),
     CHANGE(e.numbers.push_back(1))},
    {"optional number", READ(e.maybe ? e.batch.x.sum() * *e.maybe : e.batch.x.mean()),
     CHANGE(if (e.maybe && below(random, 2)) e.maybe.reset();
            else e.maybe = other_number(random, e.maybe.value_or(0)))},
    {"number in a map", READ(e.batch.x.sum() * e.coefficients.begin()->second),
     CHANGE(auto& number = e.coefficients.begin()->second; number = other_number(random, number))},
    {"key of a map", READ(e.batch.x.sum() * (e.coefficients.count("c") ? 2 : 3)),
     CHANGE(if (e.coefficients.erase("c") == 0) {
       e.coefficients.erase("b");
       e.coefficients["c"] = 0.25;
     } else e.coefficients["b"] = 0.25)},
    {"Scalar", READ((e.batch.x * e.scalar).sum()),
     CHANGE(e.scalar = below(random, 2) ? c10::Scalar(other_number(random, e.scalar.toDouble()))
                                        : c10::Scalar(3 + below(random, 4)))},
    {"TensorOptions", READ(torch::ones({3}, e.options).sum()),
     CHANGE(e.options = c10::typeMetaToScalarType(e.options.dtype()) == at::kFloat ? at::kDouble : at::kFloat)},
    {"string", READ(e.reduction == "sum" ? e.batch.x.sum() : e.batch.x.mean()),
     CHANGE(e.reduction = e.reduction == "sum" ? "mean" : "sum")},
    {"grouping of tensors", READ((torch::stack(e.first).sum(0) - torch::stack(e.second).sum(0)).sum()),
     CHANGE(
         if (e.first.size() == 2) {
           e.second.insert(e.second.begin(), e.first.back());
           e.first.pop_back();
         } else {
           e.first.push_back(e.second.front());
           e.second.erase(e.second.begin());
         })},
    {"keys of a map of tensors",
     READ(e.by_name.begin()->first == "a" ? e.by_name.begin()->second.sum() : e.by_name.begin()->second.mean()),
     CHANGE(auto node = e.by_name.extract(e.by_name.begin()); node.key() = node.key() == "a" ? "aa" : "a";
            e.by_name.insert(std::move(node)))},
    {"number", READ((e.batch.x * e.beta).sum()), CHANGE(e.beta = other_number(random, e.beta))},
    {"number in arithmetic", READ((e.batch.x * (1 - e.beta)).sum()), CHANGE(e.beta = other_number(random, e.beta))},
    {"number in a comparison", READ(e.beta > 1 ? e.batch.x.sum() : e.batch.x.mean()),
     CHANGE(e.beta = other_number(random, e.beta))},
    {"number in a size", READ(torch::ones({static_cast<int64_t>(e.beta * 4)}).sum()),
     CHANGE(e.beta = other_number(random, e.beta))},
    {"absolute value of a number", READ((e.batch.x * std::abs(e.beta)).sum() + e.batch.x.sum() * -e.beta),
     CHANGE(e.beta = -other_number(random, -e.beta))},
    {"integer", READ(e.batch.x.sum() * e.count), CHANGE(e.count = 1 + (e.count + below(random, 3)) % 5)},
    {"bool", READ(e.flag ? e.batch.x.sum() : e.batch.x.mean()), CHANGE(e.flag = !e.flag)},
    // Thread state.
    {"grad mode", READ(e.model->row.pow(2).sum()), CHANGE(e.grad_mode = !e.grad_mode)},
    {"inference mode", READ(e.batch.x.mul(c10::InferenceMode::is_enabled() ? 2 : 3).sum()),
     CHANGE(e.grad_mode = false; e.inference = !e.inference)},
    {"autocast", READ(torch::mm(e.batch.x.to(at::kFloat), e.first[0].expand({3, 3}).to(at::kFloat)).sum()),
     CHANGE(e.autocast = !e.autocast)},
    {"autocast dtype", READ(torch::mm(e.batch.x.to(at::kFloat), e.first[0].expand({3, 3}).to(at::kFloat))),
     CHANGE(e.autocast = true; e.autocast_dtype = e.autocast_dtype == at::kBFloat16 ? at::kHalf : at::kBFloat16)},
    {"autocast cache", READ(e.batch.x.mul(at::autocast::is_autocast_cache_enabled() ? 2 : 3).sum()),
     CHANGE(e.autocast_cache = !e.autocast_cache)},
    {"default dtype", READ(torch::ones({3}) * 0.1),
     CHANGE(e.default_dtype = e.default_dtype == at::kFloat ? at::kDouble : at::kFloat)},
    {"deterministic algorithms", READ(e.batch.x.mul(at::globalContext().deterministicAlgorithms() ? 2 : 3).sum()),
     CHANGE(e.deterministic = !e.deterministic)},
    // Captured variables.
    {"captured number", READ((e.batch.x * live(e.captured.captured_number).value()).sum()),
     CHANGE(e.captured_number = other_number(random, e.captured_number))},
    {"captured tensor replaced", READ((e.batch.x * e.captured.captured_tensor).sum()),
     CHANGE(e.captured_tensor = torch::randn({3}))},
    {"vector in a submodule (captured)", READ(e.model->part->weighted(e.batch.x)),
     CHANGE(e.model->part->weights[0] = other_number(random, e.model->part->weights[0]))},
    {"captured list", READ((e.batch.x * live(e.captured.captured_list[0]).value()).sum()),
     CHANGE(e.captured_list[0] = other_number(random, e.captured_list[0]))},
    {"training mode of a captured module", READ(e.captured.captured_drop(e.batch.x).sum()),
     CHANGE(e.captured_drop->train(!e.captured_drop->is_training()))},
    {"captured module replaced", READ(e.captured.captured_model(e.batch.x).sum()),
     CHANGE(e.captured_model = nn::Linear(3, 3))},
    {"captured parameter frozen", READ(e.captured.captured_model(e.batch.x).pow(2).sum()),
     CHANGE(auto& w = e.captured_model->weight; w.mutable_grad().reset(); w.requires_grad_(!w.requires_grad()))},
};
#undef READ
#undef CHANGE

using Items = std::vector<const EnvironmentItem*>;

// The step of an environment.
struct EnvironmentStep {
  Items items;
  bool trains;
  Environment* captured;

  Tensors operator()(EnvironmentNet& model, optim::SGD& optimizer, EnvironmentBatch& batch, at::Tensor& other,
                     at::Tensor& z, const std::tuple<double, int64_t>& pair, const std::vector<double>& numbers,
                     const std::optional<double>& maybe, const std::map<std::string, double>& coefficients,
                     const c10::Scalar& scalar, const c10::TensorOptions& options, const std::string& reduction,
                     const Tensors& first, const Tensors& second, const std::map<std::string, at::Tensor>& by_name,
                     double beta, int64_t count, bool flag) const {
    const View view{&model,  optimizer, batch, other,  z,       pair, numbers, maybe, coefficients, scalar,
                    options, reduction, first, second, by_name, beta, count,   flag,  *captured};
    const bool accumulates = std::any_of(items.begin(), items.end(), [](const auto* item) {
      return item->name == std::string_view("gradient set outside");
    });
    if (trains && !accumulates) optimizer.zero_grad();
    Tensors returned;
    auto loss = torch::zeros({}, at::kFloat);
    for (const auto* item : items) {
      returned.push_back(item->read(view));
      if (!is_dtensor(returned.back())) loss = loss + returned.back().to(at::kFloat).sum();
    }
    if (trains && loss.requires_grad()) {
      loss.backward();
      optimizer.step();
    }
    for (auto& t : returned) t = t.detach();
    return returned;
  }
};

std::string describe(const at::Tensor& t) {
  std::ostringstream out;
  if (!t.defined()) return "undefined";
  if (is_dtensor(t)) out << DTensor(t).placements()[0] << " ";
  const auto& local = detail::local_or_self(t);
  out << local.scalar_type() << (local.requires_grad() ? " requires grad " : " ")
      << local.detach().resolve_neg().resolve_conj().to(local.is_complex() ? at::kComplexDouble : at::kDouble);
  return out.str();
}

std::string first_difference(const char* what, const Tensors& found, const Tensors& wanted) {
  if (found.size() != wanted.size()) return c10::str(what, ": ", found.size(), " instead of ", wanted.size(), "\n");
  for (size_t i = 0; i < wanted.size(); i++) {
    const auto a = describe(found[i]), b = describe(wanted[i]);
    if (a != b) return c10::str(what, " ", i, ": ", a, "\ninstead of ", b, "\n");
  }
  return "";
}

Tensors memory_of(Environment& e) {
  auto all = e.model->parameters();
  for (const auto& t : e.model->buffers()) all.push_back(t);
  for (const auto& p : e.captured_model->parameters()) all.push_back(p);
  all.insert(all.end(), {e.batch.x, e.other, e.captured_tensor, e.group_tensor});
  for (size_t i = 0, n = all.size(); i < n; i++) all.push_back(all[i].is_leaf() ? all[i].grad() : at::Tensor());
  return all;
}

// What compile() may say instead of running a step, and why each is in the list.
constexpr const char* kRefusals[] = {
    "has changed since the step was traced",  // a captured variable without ts::live
    "has an autograd history",                // backward runs into the graph of an argument
};

struct SequenceResult {
  std::string difference;  // "": equal, or refused
  bool refused = false;
};

// Runs the step in both environments `calls` times. Before each call but the first, `change` changes both.
template <class Change>
SequenceResult run_sequence(const Items& items, bool trains, int calls, uint32_t seed, const DeviceMesh& mesh,
                            const CompileOptions& options, const Change& change) {
  Environment eager(mesh, seed), compiled(mesh, seed);
  auto step = compile(EnvironmentStep{items, trains, &compiled}, options);
  for (int call = 0; call < calls; call++) {
    if (call > 0) change(call, eager, compiled);
    Tensors wanted, found;
    try {
      const ThreadState state(eager);
      torch::manual_seed(seed + static_cast<uint32_t>(call));
      wanted = call_with(eager, EnvironmentStep{items, trains, &eager});
    } catch (const std::exception&) {
      return {};  // not a valid environment
    }
    try {
      const ThreadState state(compiled);
      torch::manual_seed(seed + static_cast<uint32_t>(call));
      found = call_with(compiled, step);
    } catch (const std::exception& error) {
      const std::string text = error.what();
      for (const auto* refusal : kRefusals)
        if (text.find(refusal) != std::string::npos) return {"", true};
      return {c10::str("call ", call, ": ", text.substr(0, 600)), false};
    }
    const auto text =
        first_difference("returned", found, wanted) + first_difference("memory", memory_of(compiled), memory_of(eager));
    if (!text.empty()) return {c10::str("call ", call, ": ", text), false};
  }
  return {};
}

struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Captured variables are seen by traces on the first calls; everything else must be seen by the guards alone.
CompileOptions options_for(const Items& items) {
  const bool captured = std::any_of(items.begin(), items.end(), [](const auto* item) {
    return std::string_view(item->name).find("captured") != std::string_view::npos;
  });
  return {.codegen = false, .check = captured ? 8 : 0, .captures = captured ? Captures::Checked : Captures::None};
}

// Each item, read alone and changed alone.
TEST(Environment, EachItemAlone) {
  testing::run_ranks(1, [](testing::Rank& me) {
    NoWarnings none;
    const c10::WarningUtils::WarningHandlerGuard quiet(&none);
    const auto mesh = me.mesh("x=1");
    for (const auto& item : kItems)
      for (uint32_t seed = 1; seed <= 4; seed++) {
        Random random(seed);
        const auto result = run_sequence({&item}, seed % 2 == 0, 4, seed, mesh, options_for({&item}),
                                         [&](int, Environment& a, Environment& b) {
                                           const auto drawn = random();
                                           for (auto* e : {&a, &b}) {
                                             torch::manual_seed(drawn);
                                             Random same(drawn);
                                             item.change(*e, same);
                                           }
                                         });
        EXPECT_EQ(result.difference, "") << item.name << ", seed " << seed;
        if (!result.difference.empty()) break;
      }
  });
}

// A change has an effect in eager mode: the generator can find a program that ignores it.
TEST(Environment, EachChangeHasAnEffect) {
  testing::run_ranks(1, [](testing::Rank& me) {
    const auto mesh = me.mesh("x=1");
    for (const auto& item : kItems) {
      Environment e(mesh, 1), changed(mesh, 1);
      bool has_effect = false;
      for (uint32_t n = 0; n < 8 && !has_effect; n++) {
        Random random(n);
        torch::manual_seed(n);
        item.change(changed, random);
        std::string texts[2];
        for (auto* each : {&e, &changed}) {
          const ThreadState state(*each);
          torch::manual_seed(n);
          std::ostringstream text;
          for (const auto& t : call_with(*each, EnvironmentStep{{&item}, true, each})) text << describe(t);
          for (const auto& t : memory_of(*each)) text << describe(t);
          texts[each == &changed] = text.str();
        }
        has_effect = texts[0] != texts[1];
      }
      EXPECT_TRUE(has_effect) << item.name;
    }
  });
}

TEST(Environment, RandomSequencesEqualEager) {
  testing::run_ranks(1, [](testing::Rank& me) {
    NoWarnings none;
    const c10::WarningUtils::WarningHandlerGuard quiet(&none);
    const auto mesh = me.mesh("x=1");
    const auto seeds = testing::soak_seeds(1, 2'000, 50'000);
    const uint32_t sequences = seeds.end - seeds.first;
    uint32_t refused = 0;
    for (uint32_t seed = seeds.first; seed < seeds.end; seed++) {
      Random random(seed);
      Items items;
      for (int64_t n = 1 + below(random, 3); n > 0; n--)
        items.push_back(&kItems[below(random, static_cast<int64_t>(std::size(kItems)))]);
      std::string changes;
      const auto result = run_sequence(
          items, below(random, 2) == 0, 4, seed, mesh, options_for(items), [&](int, Environment& a, Environment& b) {
            const auto& item = below(random, 4) == 0
                                   ? kItems[below(random, static_cast<int64_t>(std::size(kItems)))]
                                   : *items[static_cast<size_t>(below(random, static_cast<int64_t>(items.size())))];
            changes += c10::str("\n  ", item.name);
            const auto drawn = random();
            for (auto* e : {&a, &b}) {
              torch::manual_seed(drawn);
              Random same(drawn);
              item.change(*e, same);
            }
          });
      refused += result.refused;
      if (result.difference.empty()) continue;
      std::string names;
      for (const auto* item : items) names += c10::str("\n  ", item->name);
      ADD_FAILURE() << "seed " << seed << ", items" << names << "\nchanges" << changes << "\n" << result.difference;
      return;
    }
    EXPECT_LE(refused, sequences / 20);
    std::cout << refused << " of " << sequences << " sequences were refused\n";
  });
}

}  // namespace
}  // namespace tessera
