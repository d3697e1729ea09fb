// Compares DistributedDataParallel and replicate() with PyTorch's: the same weights, different data on every rank, SGD
// with a learning rate that shows a wrong factor. With two ranks losses, gradients and parameters of every step are
// bit-equal. The buckets are equal before and after the rebuild.
#include "model_request.h"
#include "run_python.h"

#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/optim/sgd.h"
#include "tessera/state/state_dict.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

#include <functional>
#include <map>
#include <sstream>

namespace tessera {
namespace {

using parity::Message;
using parity::Response;
using testing::close;
using testing::Rank;
using testing::run_ranks;

constexpr int64_t kSteps = 4, kMostRanks = 4;
const models::GPT2Config kGpt{.vocab_size = 13, .max_seq_len = 8, .n_layer = 2, .n_head = 2, .n_embd = 16};

// As in data_parallel.py: two branches that a call may skip.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { NetImpl::reset(); }
  void reset() override {
    for (auto& [name, layer] : layers()) *layer = register_module(name, torch::nn::Linear(6, 6));
  }
  at::Tensor forward(at::Tensor x, int64_t branches) {
    for (auto* layer : {&l0, &l1, &l2}) x = torch::tanh((*layer)(x));
    if (branches & 1) x = x + even(x);
    return branches & 2 ? x + odd(x) : x;
  }
  std::vector<std::pair<std::string, torch::nn::Linear*>> layers() {
    return {{"l0", &l0}, {"l1", &l1}, {"l2", &l2}, {"even", &even}, {"odd", &odd}};
  }
  torch::nn::Linear l0{nullptr}, l1{nullptr}, l2{nullptr}, even{nullptr}, odd{nullptr};
};
TESSERA_MODULE(Net);

struct SparseNetImpl : torch::nn::Cloneable<SparseNetImpl> {
  SparseNetImpl() { SparseNetImpl::reset(); }
  void reset() override {
    words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(13, 6).sparse(true)));
    l0 = register_module("l0", torch::nn::Linear(6, 6));
    l1 = register_module("l1", torch::nn::Linear(6, 6));
  }
  at::Tensor forward(const at::Tensor& x, int64_t) { return l1(torch::tanh(l0(words(x)))); }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear l0{nullptr}, l1{nullptr};
};
TESSERA_MODULE(SparseNet);

using CompressHook = BucketResult (*)(const comm::Group&, GradBucket&);
struct DataParallelCase {
  std::string name;
  std::string model = "net";
  std::vector<int64_t> ranks = {2};
  int64_t cap = 200;  // bytes per bucket
  bool unused = false, view = false, static_graph = false, replicate = false;
  std::string hook = "";
  int64_t passes = 1;     // only the last one reduces gradients
  std::string join = "";  // ranks with an even number have half of the batches; gradients are divided by all or active
  double lr = 0.5;
};
const DataParallelCase kDataParallelCases[] = {
    {.name = "plain", .ranks = {2, 4}},
    {.name = "view", .view = true},
    {.name = "unused", .unused = true},
    {.name = "unused view", .unused = true, .view = true},
    {.name = "static", .static_graph = true},
    {.name = "fp16", .hook = "fp16"},
    {.name = "bf16 view", .view = true, .hook = "bf16"},
    // One bucket: over gloo, PyTorch's hook confuses the all-reduces of several.
    {.name = "powersgd", .cap = 1 << 20, .hook = "powersgd"},
    {.name = "no_sync", .passes = 3},
    {.name = "no_sync view", .view = true, .passes = 3},
    {.name = "replicate", .replicate = true},
    {.name = "replicate no_sync view", .view = true, .replicate = true, .passes = 2},
    {.name = "replicate bf16", .replicate = true, .hook = "bf16"},
    {.name = "join", .ranks = {2, 4}, .join = "all"},
    // Without find_unused_parameters: PyTorch's rank that has joined repeats which parameters its last batch used.
    {.name = "join active view", .view = true, .join = "active"},
    {.name = "join bf16", .hook = "bf16", .join = "all"},
    {.name = "sparse", .model = "sparse", .ranks = {2, 4}},
    {.name = "sparse no_sync", .model = "sparse", .passes = 2},
    {.name = "sparse join", .model = "sparse", .join = "active"},
    {.name = "gpt2", .model = "gpt2", .ranks = {2, 4}, .cap = 4000, .lr = 0.3},
    {.name = "gpt2 replicate view", .model = "gpt2", .cap = 4000, .view = true, .replicate = true, .lr = 0.3},
};
const std::map<std::string, CompressHook> kHooks = {{"fp16", fp16_compress_hook}, {"bf16", bf16_compress_hook}};
void register_hook(auto& wrapped, const std::string& name) {
  if (name == "powersgd") {
    auto state = std::make_shared<PowerSGDState>();
    state->matrix_approximation_rank = 2;
    state->start_powerSGD_iter = 2;
    state->min_compression_rate = 1;
    state->random_seed = 3;
    wrapped.register_comm_hook(state, powerSGD_hook);
  } else if (!name.empty()) {
    wrapped.register_comm_hook(nullptr, kHooks.at(name));
  }
}

std::string options_text(const DataParallelCase& c) {
  std::string ranks;
  for (const auto n : c.ranks) ranks += c10::str(ranks.empty() ? "" : ",", n);
  auto settings = models::settings(kGpt);
  std::replace(settings.begin(), settings.end(), ' ', ',');
  return c10::str("model=", c.model, " ranks=", ranks, " cap=", c.cap, " lr=", c.lr, c.unused ? " unused=1" : "",
                  c.view ? " view=1" : "", c.static_graph ? " static=1" : "", c.replicate ? " api=replicate" : "",
                  c.hook.empty() ? "" : " hook=" + c.hook, c.join.empty() ? "" : " join=" + c.join,
                  " settings=", settings);
}

Message make_request() {
  torch::manual_seed(17);
  Message request;
  const auto add_weights = [&](const std::string& name, const torch::nn::Module& module) {
    for (const auto& [key, t] : state_dict(module))
      request.tensors[name + "/weights/" + key] = torch::empty_like(t).uniform_(-0.4, 0.4);
  };
  for (const auto& c : kDataParallelCases) {
    request.texts[c.name] = options_text(c);
    const std::vector<int64_t> leading = {kSteps, c.passes, kMostRanks};
    const auto shape = [&](std::vector<int64_t> one) {
      one.insert(one.begin(), leading.begin(), leading.end());
      return one;
    };
    for (const std::string what : {"/inputs", "/targets"})
      request.tensors[c.name + what] =
          c.model == "sparse" && what == "/inputs" ? torch::randint(13, shape({5}), torch::kLong)
          : c.model == "gpt2"                      ? torch::randint(kGpt.vocab_size, shape({2, 7}), torch::kLong)
                                                   : torch::randn(shape({5, 6}));
    if (c.model == "gpt2")
      add_weights(c.name, *models::GPT2(kGpt));
    else if (c.model == "sparse")
      add_weights(c.name, *SparseNet());
    else
      add_weights(c.name, *Net());
  }
  return request;
}

// Buckets in the form of PyTorch's log: "9 8 , 7 6", and their bytes "168 , 168".
struct BucketTexts {
  std::string indices, bytes;
};
BucketTexts texts_of(const data_parallel::Reducer& reducer) {
  BucketTexts texts;
  for (const auto& bucket : reducer.buckets()) {
    if (!texts.bytes.empty()) texts.indices += " , ", texts.bytes += " , ";
    size_t bytes = 0;
    for (size_t at = 0; at < bucket.size(); at++) {
      texts.indices += c10::str(at ? " " : "", bucket[at]);
      bytes += reducer.parameters()[bucket[at]].value.nbytes();
    }
    texts.bytes += std::to_string(bytes);
  }
  return texts;
}

// A wrapped model, by either API.
struct WrappedModel {
  std::function<at::Tensor(const at::Tensor& x, int64_t branches)> call;
  std::function<void(bool)> set_sync;
  std::function<const data_parallel::Reducer*()> reducer;  // null before the first forward of replicate()
  std::function<void(const std::function<void()>& body, const JoinOptions& options)> join = {};
};
template <class H>
WrappedModel wrap(H model, const DataParallelCase& c, auto forward) {
  const DDPOptions options{.bucket_cap_mb = static_cast<double>(c.cap) / (1 << 20),
                           .find_unused_parameters = c.unused,
                           .gradient_as_bucket_view = c.view,
                           .static_graph = c.static_graph};
  if (c.replicate) {
    auto handle = replicated(replicate(model, {options}));
    register_hook(handle, c.hook);
    return {[=](const at::Tensor& x, int64_t branches) mutable { return forward(model, x, branches); },
            [=](bool sync) mutable { handle.set_requires_gradient_sync(sync); },
            [=] { return handle.replica() ? handle.replica()->reducer() : nullptr; }};
  }
  DistributedDataParallel ddp(model, options);
  register_hook(*ddp, c.hook);
  return {[=](const at::Tensor& x, int64_t branches) mutable { return forward(ddp, x, branches); },
          [=](bool sync) mutable { ddp->set_requires_gradient_sync(sync); }, [=] { return ddp->replica().reducer(); },
          [=](const std::function<void()>& body, const JoinOptions& options) mutable { ddp->join(body, options); }};
}

// In four steps: both branches on all ranks; one branch on each rank; one branch on rank 0 only; none.
int64_t branches_of(const DataParallelCase& c, int64_t step, int64_t rank) {
  const int64_t by_step[] = {3, 1 << (rank % 2), rank == 0 ? 1 : 0, 0};
  return c.unused ? by_step[step] : 3;
}

template <class H>
void train(H model, const DataParallelCase& c, Rank& me, const Message& request, const Response& response, auto forward,
           auto loss) {
  const auto key = c10::str(c.name, "/", me.size(), "/", me.rank, "/");
  SCOPED_TRACE(key);
  {
    const torch::NoGradGuard no_grad;  // rank 0's values are broadcast
    for (const auto& item : model->named_parameters())
      item.value().copy_(request.tensors.at(c.name + "/weights/" + item.key()) + me.rank);
  }
  const auto parameters = model->named_parameters();
  const auto wrapped = wrap(model, c, forward);
  std::unique_ptr<torch::optim::Optimizer> optimizer =
      std::make_unique<optim::SGD>(model->parameters(), optim::SGDOptions{.lr = c.lr});
  if (c.model == "sparse") optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), c.lr);
  const auto same = [&](const at::Tensor& ours, const std::string& name) {
    const auto found = response.tensors.find(key + name);
    ASSERT_EQ(ours.defined(), found != response.tensors.end()) << name;
    if (!ours.defined()) return;
    if (me.size() > 2 || c.model == "sparse" || c.hook == "powersgd")
      EXPECT_EQ(close(ours, found->second), "") << name;  // the order of the sum may differ
    else
      EXPECT_TRUE(torch::equal(ours, found->second)) << name << ": " << close(ours, found->second, {0, 0});
  };
  const auto inputs = request.tensors.at(c.name + "/inputs"), targets = request.tensors.at(c.name + "/targets");
  std::vector<at::Tensor> losses;
  std::string first_bytes;
  const auto one_step = [&](int64_t step) {
    optimizer->zero_grad();
    for (int64_t pass = 0; pass < c.passes; pass++) {
      wrapped.set_sync(pass + 1 == c.passes);
      const auto output = wrapped.call(inputs[step][pass][me.rank], branches_of(c, step, me.rank));
      const auto value = loss(output, targets[step][pass][me.rank]);
      if (step == 0) first_bytes = texts_of(*wrapped.reducer()).bytes;
      value.backward();
      losses.push_back(value.detach());
    }
    for (const auto& item : parameters) {
      const auto& gradient = item.value().grad();
      same(gradient.defined() ? gradient.to_dense() : gradient, c10::str("grads/", step, "/", item.key()));
    }
    optimizer->step();
    for (const auto& item : parameters) same(item.value().detach(), c10::str("parameters/", step, "/", item.key()));
  };
  const auto all_steps = [&](int64_t steps) {
    for (int64_t step = 0; step < steps; step++) one_step(step);
  };
  if (c.join.empty()) {
    all_steps(kSteps);
  } else {
    wrapped.join([&] { all_steps(me.rank % 2 ? kSteps : kSteps / 2); },
                 {.divide_by_initial_world_size = c.join == "all"});
    for (const auto& item : parameters) same(item.value().detach(), c10::str("parameters/", kSteps, "/", item.key()));
  }
  same(torch::stack(losses), "losses");
  if (c.model == "sparse") return;  // PyTorch has a bucket for each sparse gradient
  if (!c.join.empty()) return;      // and logs other buckets after a join
  EXPECT_EQ(first_bytes, response.texts.at(key + "bucket_sizes"));
  const auto rebuilt = texts_of(*wrapped.reducer());
  EXPECT_EQ(wrapped.reducer()->rebuilt(), !c.unused);
  EXPECT_GE(wrapped.reducer()->buckets().size(), c.hook == "powersgd" ? 1u : 3u);
  EXPECT_EQ(wrapped.reducer()->rebuilt() ? rebuilt.bytes : "", response.texts.at(key + "rebuilt_bucket_sizes"));
  EXPECT_EQ(wrapped.reducer()->rebuilt() ? rebuilt.indices : "",
            response.texts.at(key + "rebuilt_per_bucket_param_indices"));
}

void train_net(const DataParallelCase& c, Rank& me, const Message& request, const Response& response) {
  const auto forward = [](auto& model, const at::Tensor& x, int64_t branches) { return model(x, branches); };
  const auto loss = [](const at::Tensor& y, const at::Tensor& target) { return torch::mse_loss(y, target); };
  if (c.model == "sparse")
    train(SparseNet(), c, me, request, response, forward, loss);
  else
    train(Net(), c, me, request, response, forward, loss);
}

TEST(DataParallelParity, TrainsLikePyTorch) {
  const auto request = make_request();
  const Response response = parity::run_python("data_parallel.py", request);
  SKIP_WITHOUT_PYTHON(response);
  for (const auto& c : kDataParallelCases)
    for (const int64_t n : c.ranks)
      run_ranks(n, [&](Rank& me) {
        if (c.model == "gpt2")
          train(
              models::GPT2(kGpt), c, me, request, response,
              [](auto& model, const at::Tensor& x, int64_t) { return model(x); }, models::loss);
        else
          train_net(c, me, request, response);
      });
}

// Needs no PyTorch: the mean over ranks of the batch means is the mean over the global batch.
TEST(DataParallelParity, TrainsLikeOneRankOnTheGlobalBatch) {
  torch::manual_seed(19);
  const models::GPT2 start(kGpt);
  const auto tokens = torch::randint(kGpt.vocab_size, {kSteps, 4, 8}, torch::kLong);
  const auto train = [&](auto& model, int64_t rank, int64_t ranks) {
    optim::SGD optimizer(model->parameters(), {.lr = 0.3, .momentum = 0.5});
    for (int64_t step = 0; step < kSteps; step++) {
      const auto mine = tokens[step].chunk(ranks)[rank];
      optimizer.zero_grad();
      models::loss(model(mine.narrow(1, 0, 7)), mine.narrow(1, 1, 7)).backward();
      optimizer.step();
    }
  };
  auto plain = clone(start);
  train(plain, 0, 1);
  const auto wanted = plain->parameters();
  ASSERT_NE(close(start->parameters(), wanted, {0, 1e-2}), "");  // training changed the parameters
  for (const int64_t n : {1, 2, 4})
    run_ranks(n, [&](Rank& me) {
      auto model = clone(start);
      DistributedDataParallel ddp(model, {.bucket_cap_mb = 0.004});
      train(ddp, me.rank, n);
      EXPECT_EQ(close(model->parameters(), wanted), "") << "rank " << me.rank << " of " << n;
    });
}

}  // namespace
}  // namespace tessera
