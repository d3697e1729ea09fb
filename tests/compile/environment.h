#pragma once
// The environment of a compiled step: what it reads, and the state around it. environment_items.h has the changes.
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/sgd.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace tessera::environment {

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
    unflatten = register_module("unflatten", torch::nn::Unflatten(torch::nn::UnflattenOptions(0, {2, 2})));
    places = register_module("places", std::make_shared<torch::nn::Module>());
    places->register_module("it", torch::nn::ReLU());
    row = register_parameter("row", torch::randn({4}));
    twin = register_parameter("twin", torch::randn({4}));
    shared_buffer = register_buffer("shared_buffer", torch::randn({3}));
    matrix = register_parameter("matrix", torch::randn({2, 3}));
    placed = register_parameter("placed", distribute_tensor(torch::randn({4}), mesh, {Shard(0)}), false);
    state = register_buffer("state", torch::randn({3}));
  }
  nn::Linear fc{nullptr}, body{nullptr};
  nn::Dropout drop{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  std::shared_ptr<torch::nn::Module> bag, places;
  EnvironmentPart part{nullptr};
  torch::nn::Unflatten unflatten{nullptr};
  at::Tensor row, twin, matrix, placed, state, shared_buffer;
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
    has_hook = false;
    accumulators.clear();
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
  at::Tensor other, z, number_tensor = torch::full({}, 0.5, at::kDouble);
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
  double hook_number = 0.5;      // read by a hook of the model
  bool has_hook = false;         // that reads it
  std::vector<decltype(torch::autograd::impl::grad_accumulator(at::Tensor()))>
      accumulators;  // of gradients; LibTorch does not own them
  Tensors kept;      // gradients of earlier calls

  // Thread state, set around each call.
  bool grad_mode = true, inference = false, autocast = false, autocast_cache = true, deterministic = false;
  bool anomaly = false, below_autograd = false, mkldnn = true;
  c10::ScalarType autocast_dtype = at::kBFloat16, default_dtype = at::kFloat;
  int threads = 1;
  const char* precision = "highest";
};

// What the items read: the arguments of a call, and the environment for captured variables.
struct View {
  EnvironmentNet* model;
  optim::SGD& optimizer;
  EnvironmentBatch& batch;
  at::Tensor &other, &z, &number_tensor;
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
  return step(*e.model, *e.optimizer, e.batch, e.other, e.z, e.number_tensor, e.pair, e.numbers, e.maybe,
              e.coefficients, e.scalar, e.options, e.reduction, e.first, e.second, e.by_name, e.beta, e.count, e.flag);
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
    at::globalContext().setUserEnabledMkldnn(e.mkldnn);
    torch::autograd::AnomalyMode::set_enabled(e.anomaly);
    at::set_num_threads(e.threads);
    at::globalContext().setFloat32MatmulPrecision(e.precision);
    if (e.below_autograd) below_.emplace();
  }
  ~ThreadState() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(true);
    at::autocast::clear_cache();
    at::set_default_dtype(caffe2::TypeMeta::Make<float>());
    at::globalContext().setDeterministicAlgorithms(false, false);
    at::globalContext().setUserEnabledMkldnn(true);
    torch::autograd::AnomalyMode::set_enabled(false);
    at::set_num_threads(1);
    at::globalContext().setFloat32MatmulPrecision("highest");
  }
  ThreadState(const ThreadState&) = delete;

 private:
  c10::InferenceMode inference_;  // sets the grad mode too
  at::AutoGradMode grad_;
  std::optional<at::AutoDispatchBelowAutograd> below_;
};

using Random = std::mt19937;
inline int64_t below(Random& random, int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
inline double other_number(Random& random, double now) {
  const double next = static_cast<double>(1 + below(random, 7)) * 0.25;
  return next == now ? next + 2 : next;
}
inline at::Tensor new_leaf(const at::Tensor& value) { return value.detach().clone().requires_grad_(true); }

// One item of an environment: how a step reads it, and a change of it. Changes draw the same
// random numbers in both environments.
struct EnvironmentItem {
  const char* name;
  at::Tensor (*read)(const View& e);
  void (*change)(Environment& e, Random& random);
};

using Items = std::vector<const EnvironmentItem*>;

// The step of an environment.
struct EnvironmentStep {
  Items items;
  bool trains;
  Environment* captured;

  Tensors operator()(EnvironmentNet& model, optim::SGD& optimizer, EnvironmentBatch& batch, at::Tensor& other,
                     at::Tensor& z, at::Tensor& number_tensor, const std::tuple<double, int64_t>& pair,
                     const std::vector<double>& numbers, const std::optional<double>& maybe,
                     const std::map<std::string, double>& coefficients, const c10::Scalar& scalar,
                     const c10::TensorOptions& options, const std::string& reduction, const Tensors& first,
                     const Tensors& second, const std::map<std::string, at::Tensor>& by_name, double beta,
                     int64_t count, bool flag) const {
    const View view{&model, optimizer, batch,     other, z,      number_tensor, pair, numbers, maybe, coefficients,
                    scalar, options,   reduction, first, second, by_name,       beta, count,   flag,  *captured};
    const bool accumulates = std::any_of(items.begin(), items.end(), [](const auto* item) {
      return std::string_view(item->name).starts_with("gradient s");
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

}  // namespace tessera::environment
