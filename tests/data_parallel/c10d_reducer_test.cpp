// Compares Reducer with c10d::Reducer, which PyTorch's DDP uses. Two copies of a model, one for each reducer, are
// trained on the same ranks over gloo. Ranks have different data and SGD steps are large, so that a wrong factor shows.
// With two ranks a sum has only one order, so gradients must be bitwise equal.
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <rapidcheck.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>

namespace tessera::data_parallel {
namespace {

using testing::close;
using testing::Rank;
using testing::run_ranks;

constexpr int kSteps = 4;
constexpr int64_t kCap = 200;  // bytes per bucket: the model needs several
constexpr double kCapMb = static_cast<double>(kCap) / (1 << 20);

// Each layer has one dtype. A call may skip a branch.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const std::vector<at::ScalarType>& dtypes) {
    for (size_t i = 0; i < dtypes.size(); i++) {
      layers.push_back(register_module(c10::str("layer", i), torch::nn::Linear(6, 6)));
      layers.back()->to(dtypes[i]);
    }
    branches[0] = register_module("even", torch::nn::Linear(6, 6));
    branches[1] = register_module("odd", torch::nn::Linear(6, 6));
  }
  at::Tensor forward(at::Tensor x, std::vector<size_t> which) {
    for (auto& layer : layers) x = torch::tanh(layer(x.to(layer->weight.scalar_type())));
    x = x.to(at::kFloat);
    for (const size_t branch : which) x = x + branches[branch](x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear branches[2] = {nullptr, nullptr};
};
using Net = std::shared_ptr<NetImpl>;

enum class Hook { None, Fp16, Bf16 };

struct Case {
  const char* name;
  std::vector<at::ScalarType> dtypes = {at::kFloat, at::kFloat, at::kFloat};
  bool find_unused = false;
  bool view = false;
  Hook hook = Hook::None;
  bool accumulate = false;  // two of three passes are not reduced
};
const Case kCases[] = {
    {.name = "plain"},
    {.name = "four dtypes", .dtypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kDouble}},
    {.name = "view", .view = true},
    {.name = "dtypes and view", .dtypes = {at::kDouble, at::kFloat, at::kBFloat16}, .view = true},
    {.name = "unused", .find_unused = true},
    {.name = "unused and view", .find_unused = true, .view = true},
    {.name = "fp16", .hook = Hook::Fp16},
    {.name = "fp16, dtypes and view", .dtypes = {at::kFloat, at::kDouble}, .view = true, .hook = Hook::Fp16},
    {.name = "bf16", .hook = Hook::Bf16},
    {.name = "no_sync", .accumulate = true},
    {.name = "no_sync and view", .view = true, .accumulate = true},
};

// In PyTorch this hook exists only in Python.
class Bf16Hook : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    auto small = bucket.getBuffer().to(at::kBFloat16).div_(state_->getSize());
    std::vector<at::Tensor> tensors{small};
    return state_->allreduce(tensors)->getFuture()->then(
        [buffer = bucket.getBuffer()](c10::ivalue::Future& done) -> c10::IValue {
          const auto value = done.value();
          return buffer.copy_(value.isTensorList() ? value.toTensorList().get(0) : value.toTensorVector()[0]);
        },
        c10::ListType::ofTensors());
  }
};

// Calls c10d::Reducer as PyTorch's DistributedDataParallel does.
class Theirs {
 public:
  Theirs(Net net, const comm::Group& group, const Case& c) : net_(std::move(net)), c_(c) {
    parameters_ = net_->parameters();
    const size_t limit = c.find_unused ? kCap : std::numeric_limits<int64_t>::max();
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(parameters_, {limit}));
    std::reverse(buckets.begin(), buckets.end());
    reducer_ = std::make_shared<c10d::Reducer>(
        parameters_, std::move(buckets), group->process_group(), std::vector<bool>{}, kCap, c.find_unused, c.view,
        std::unordered_map<size_t, std::string>{}, kCap, /*skip_all_reduce_unused_params=*/false,
        /*use_python_reducer=*/false, std::vector<int64_t>{});
    logger_ = std::make_shared<c10d::Logger>(reducer_);
    reducer_->set_logger(logger_);  // required: the reducer always calls it
    if (c.hook == Hook::Fp16) reducer_->register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
    if (c.hook == Hook::Bf16) reducer_->register_comm_hook(std::make_unique<Bf16Hook>(group->process_group()));
  }
  ~Theirs() { reducer_->remove_autograd_hooks(); }
  Theirs(const Theirs&) = delete;

  at::Tensor forward(const at::Tensor& x, const std::vector<size_t>& branches, bool sync) {
    reducer_->prepare_for_forward();
    if (sync) reducer_->rebuild_buckets();
    const auto y = net_->forward(x, branches);
    if (sync) reducer_->prepare_for_backward(c_.find_unused ? Tensors{y} : Tensors{});
    return y;
  }
  Buckets buckets() const {
    Buckets all;
    for (const auto& bucket : reducer_->get_grad_buckets()) {
      auto& indices = all.emplace_back();
      for (const auto& p : bucket.getParameters())
        for (size_t i = 0; i < parameters_.size(); i++)
          if (p.is_same(parameters_[i])) indices.push_back(i);
    }
    return all;
  }

 private:
  Net net_;
  const Case& c_;
  Tensors parameters_;
  std::shared_ptr<c10d::Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
};

// c10d returns buckets that are not full last, one per dtype, in the order of a hash table. So these compare as a set.
void expect_same(Buckets ours, Buckets theirs, bool in_order) {
  if (!in_order) std::sort(ours.begin(), ours.end()), std::sort(theirs.begin(), theirs.end());
  EXPECT_EQ(ours, theirs);
}

void step_down(const Tensors& parameters) {
  const at::NoGradGuard no_grad;
  for (const auto& p : parameters)
    if (p.grad().defined()) p.sub_(p.grad(), 0.5);
}
void zero_grad(const Tensors& parameters) {
  for (const auto& p : parameters) p.mutable_grad().reset();
}

// Four steps: both branches on both ranks; another branch on each rank; one branch on one rank only; no branch.
std::vector<size_t> branches_used(const Case& c, int step, int64_t rank) {
  if (!c.find_unused) return {0, 1};
  const std::vector<size_t> by_step[] = {{0, 1}, {static_cast<size_t>(rank)}, rank == 0 ? Bucket{0} : Bucket{}, {}};
  return by_step[step];
}

void train_beside_c10d(Rank& me, const Case& c) {
  SCOPED_TRACE(c10::str(c.name, ", rank ", me.rank));
  const auto ours_net = std::make_shared<NetImpl>(c.dtypes), theirs_net = std::make_shared<NetImpl>(c.dtypes);
  const auto ours_parameters = ours_net->parameters(), theirs_parameters = theirs_net->parameters();
  const auto names = ours_net->named_parameters().keys();

  DistributedDataParallel ours(
      ours_net, {.bucket_cap_mb = kCapMb, .find_unused_parameters = c.find_unused, .gradient_as_bucket_view = c.view});
  if (c.hook == Hook::Fp16) ours->register_comm_hook(nullptr, fp16_compress_hook);
  if (c.hook == Hook::Bf16) ours->register_comm_hook(nullptr, bf16_compress_hook);
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < names.size(); i++) theirs_parameters[i].copy_(ours_parameters[i]);
  }
  Theirs theirs(theirs_net, me.group(), c);

  for (int step = 0; step < kSteps; step++) {
    const auto branches = branches_used(c, step, me.rank);
    for (int pass = 0; pass < (c.accumulate ? 3 : 1); pass++) {
      const bool sync = !c.accumulate || pass == 2;
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + 10 * pass + me.rank);
      const auto x = torch::randn({5, 6}, generator), y = torch::randn({5, 6}, generator);
      ours->set_requires_gradient_sync(sync);
      torch::mse_loss(ours(x, branches), y).backward();
      torch::mse_loss(theirs.forward(x, branches, sync), y).backward();
    }
    for (size_t i = 0; i < names.size(); i++) {
      const auto a = ours_parameters[i].grad(), b = theirs_parameters[i].grad();
      ASSERT_EQ(a.defined(), b.defined()) << names[i] << " in step " << step;
      EXPECT_TRUE(!a.defined() || a.equal(b)) << names[i] << " in step " << step << ": " << close(a, b, {0, 0});
    }
    step_down(ours_parameters), step_down(theirs_parameters);
    zero_grad(ours_parameters), zero_grad(theirs_parameters);
    const auto* reducer = ours->replica().reducer();
    EXPECT_EQ(reducer->rebuilt(), !c.find_unused && step > 0);
    if (step > 0 || c.find_unused)
      expect_same(reducer->buckets(), theirs.buckets(), std::set(c.dtypes.begin(), c.dtypes.end()).size() == 1);
  }
  EXPECT_GE(theirs.buckets().size(), 3u);
}

TEST(C10dReducer, GradientsAreBitwiseEqual) {
  run_ranks(2,
            [](Rank& me) {
              for (const auto& c : kCases) train_beside_c10d(me, c);
            },
            {.backend = "gloo"});
}

// PyTorch makes buckets with compute_bucket_assignment_by_size, with and without an order.
void fill_beside_c10d() {
  const auto dtypes = {at::kFloat, at::kDouble, at::kBFloat16};
  const auto count = *rc::gen::inRange<size_t>(1, 40);
  const auto limits = BucketLimits{*rc::gen::inRange<int64_t>(1, 200), *rc::gen::inRange<int64_t>(1, 400)};
  const bool mixed = *rc::gen::arbitrary<bool>(), sparse = *rc::gen::arbitrary<bool>();
  Tensors tensors;
  std::vector<BucketItem> items;
  std::vector<bool> alone;
  std::vector<size_t> order;
  for (size_t i = 0; i < count; i++) {
    const auto dtype = mixed ? *rc::gen::elementOf(dtypes) : at::kFloat;
    tensors.push_back(at::empty({*rc::gen::inRange<int64_t>(0, 60)}, dtype));
    alone.push_back(sparse && *rc::gen::inRange(0, 5) == 0);
    items.push_back({static_cast<int64_t>(tensors[i].nbytes()), dtype, at::kCPU, alone[i]});
    order.push_back(i);
  }
  const std::vector<size_t> caps = {static_cast<size_t>(limits.first), static_cast<size_t>(limits.rest)};
  std::shuffle(order.begin(), order.end(), std::mt19937(*rc::gen::arbitrary<uint32_t>()));
  Tensors in_order;
  for (const size_t i : order) in_order.push_back(tensors[i]);
  const auto filled = fill_buckets(items, order, limits);
  const auto theirs = std::get<0>(
      c10d::compute_bucket_assignment_by_size(in_order, caps, alone, std::vector<int64_t>(order.begin(), order.end())));
  // The last buckets, one per dtype, are in the order of a hash table.
  const size_t dtypes_met = mixed ? 3 : 1;
  const auto full = static_cast<int64_t>(std::max(theirs.size(), dtypes_met) - dtypes_met);
  RC_ASSERT(filled.size() == theirs.size());
  RC_ASSERT(std::equal(filled.begin(), filled.begin() + full, theirs.begin()));
  RC_ASSERT((std::set(filled.begin() + full, filled.end()) == std::set(theirs.begin() + full, theirs.end())));
}
TEST(C10dReducer, FillsTheSameBuckets) { EXPECT_TRUE(rc::check(fill_beside_c10d)); }

}  // namespace
}  // namespace tessera::data_parallel
