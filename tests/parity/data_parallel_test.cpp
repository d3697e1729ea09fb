// DistributedDataParallel and replicate() beside PyTorch's: the same weights, different data on every rank, SGD with
// steps that are large enough to show a wrong factor. With two ranks, bit for bit: losses, gradients and parameters of
// every step, and the buckets before and after they are rebuilt.
#include "ask_python.h"
#include "model_settings.h"

#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/state/state_dict.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

#include <functional>
#include <map>
#include <sstream>

namespace tessera {
namespace {

using parity::Answer;
using parity::Message;
using testing::close;
using testing::Rank;
using testing::run_ranks;

constexpr int64_t kSteps = 4, kMostRanks = 4;
const models::GPT2Config kGpt{.vocab_size = 13, .max_seq_len = 8, .n_layer = 2, .n_head = 2, .n_embd = 16};

// As data_parallel.py has it: two branches that a call may leave out.
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

using CompressHook = BucketResult (*)(const comm::Group&, GradBucket&);
struct Case {
  std::string name;
  std::string model = "net";
  std::vector<int64_t> ranks = {2};
  int64_t cap = 200;  // bytes a bucket
  bool unused = false, view = false, static_graph = false, replicate = false;
  std::string hook = "";
  int64_t passes = 1;  // all but the last are not reduced
  double lr = 0.5;
};
const Case kCases[] = {
    {.name = "plain", .ranks = {2, 4}},
    {.name = "view", .view = true},
    {.name = "unused", .unused = true},
    {.name = "unused view", .unused = true, .view = true},
    {.name = "static", .static_graph = true},
    {.name = "fp16", .hook = "fp16"},
    {.name = "bf16 view", .view = true, .hook = "bf16"},
    {.name = "no_sync", .passes = 3},
    {.name = "no_sync view", .view = true, .passes = 3},
    {.name = "replicate", .replicate = true},
    {.name = "replicate no_sync view", .view = true, .replicate = true, .passes = 2},
    {.name = "replicate bf16", .replicate = true, .hook = "bf16"},
    {.name = "gpt2", .model = "gpt2", .ranks = {2, 4}, .cap = 4000, .lr = 0.3},
    {.name = "gpt2 replicate view", .model = "gpt2", .cap = 4000, .view = true, .replicate = true, .lr = 0.3},
};
const std::map<std::string, CompressHook> kHooks = {{"fp16", fp16_compress_hook}, {"bf16", bf16_compress_hook}};

std::string row(const Case& c) {
  std::string ranks;
  for (const auto n : c.ranks) ranks += c10::str(ranks.empty() ? "" : ",", n);
  auto settings = models::settings(kGpt);
  std::replace(settings.begin(), settings.end(), ' ', ',');
  return c10::str("model=", c.model, " ranks=", ranks, " cap=", c.cap, " lr=", c.lr, c.unused ? " unused=1" : "",
                  c.view ? " view=1" : "", c.static_graph ? " static=1" : "", c.replicate ? " api=replicate" : "",
                  c.hook.empty() ? "" : " hook=" + c.hook, " settings=", settings);
}

Message make_question() {
  torch::manual_seed(17);
  Message question;
  const auto add_weights = [&](const std::string& name, const torch::nn::Module& module) {
    for (const auto& [key, t] : state_dict(module))
      question.tensors[name + "/weights/" + key] = torch::empty_like(t).uniform_(-0.4, 0.4);
  };
  for (const auto& c : kCases) {
    question.texts[c.name] = row(c);
    const std::vector<int64_t> runs = {kSteps, c.passes, kMostRanks};
    const auto shape = [&](std::vector<int64_t> one) {
      one.insert(one.begin(), runs.begin(), runs.end());
      return one;
    };
    for (const char* what : {"/inputs", "/targets"})
      question.tensors[c.name + what] = c.model == "gpt2" ? torch::randint(kGpt.vocab_size, shape({2, 7}), torch::kLong)
                                                          : torch::randn(shape({5, 6}));
    if (c.model == "gpt2")
      add_weights(c.name, *models::GPT2(kGpt));
    else
      add_weights(c.name, *Net());
  }
  return question;
}

// Buckets as PyTorch's log has them: "9 8 , 7 6", and their bytes "168 , 168".
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

// One model in training, wrapped either way.
struct Trainee {
  std::function<at::Tensor(const at::Tensor& x, int64_t branches)> call;
  std::function<void(bool)> set_sync;
  std::function<const data_parallel::Reducer*()> reducer;  // null before the first forward of a lazy one
};
template <class H>
Trainee wrap(H model, const Case& c, auto forward) {
  const DDPOptions options{.bucket_cap_mb = static_cast<double>(c.cap) / (1 << 20),
                           .find_unused_parameters = c.unused,
                           .gradient_as_bucket_view = c.view,
                           .static_graph = c.static_graph};
  if (c.replicate) {
    auto handle = replicated(replicate(model, {options}));
    if (!c.hook.empty()) handle.register_comm_hook(nullptr, kHooks.at(c.hook));
    return {[=](const at::Tensor& x, int64_t branches) mutable { return forward(model, x, branches); },
            [=](bool sync) mutable { handle.set_requires_gradient_sync(sync); },
            [=] { return handle.replica() ? handle.replica()->reducer() : nullptr; }};
  }
  DistributedDataParallel ddp(model, options);
  if (!c.hook.empty()) ddp->register_comm_hook(nullptr, kHooks.at(c.hook));
  return {[=](const at::Tensor& x, int64_t branches) mutable { return forward(ddp, x, branches); },
          [=](bool sync) mutable { ddp->set_requires_gradient_sync(sync); }, [=] { return ddp->replica().reducer(); }};
}

// Of four steps: both branches everywhere; every rank one of them; one on the first rank only; none.
int64_t branches_of(const Case& c, int64_t step, int64_t rank) {
  const int64_t by_step[] = {3, 1 << (rank % 2), rank == 0 ? 1 : 0, 0};
  return c.unused ? by_step[step] : 3;
}

template <class H>
void train(H model, const Case& c, Rank& me, const Message& question, const Answer& answer, auto forward, auto loss) {
  const auto key = c10::str(c.name, "/", me.size(), "/", me.rank, "/");
  SCOPED_TRACE(key);
  {
    const torch::NoGradGuard no_grad;  // the first rank's are what counts
    for (const auto& item : model->named_parameters())
      item.value().copy_(question.tensors.at(c.name + "/weights/" + item.key()) + me.rank);
  }
  const auto parameters = model->named_parameters();
  const auto trainee = wrap(model, c, forward);
  optim::SGD optimizer(model->parameters(), {.lr = c.lr});
  const auto same = [&](const at::Tensor& ours, const std::string& name) {
    const auto found = answer.tensors.find(key + name);
    ASSERT_EQ(ours.defined(), found != answer.tensors.end()) << name;
    if (!ours.defined()) return;
    if (me.size() > 2)
      EXPECT_EQ(close(ours, found->second), "") << name;  // three or more numbers have more than one sum
    else
      EXPECT_TRUE(torch::equal(ours, found->second)) << name << ": " << close(ours, found->second, {0, 0});
  };
  const auto inputs = question.tensors.at(c.name + "/inputs"), targets = question.tensors.at(c.name + "/targets");
  std::vector<at::Tensor> losses;
  std::string first_bytes;
  for (int64_t step = 0; step < kSteps; step++) {
    optimizer.zero_grad();
    for (int64_t pass = 0; pass < c.passes; pass++) {
      trainee.set_sync(pass + 1 == c.passes);
      const auto output = trainee.call(inputs[step][pass][me.rank], branches_of(c, step, me.rank));
      const auto value = loss(output, targets[step][pass][me.rank]);
      if (step == 0) first_bytes = texts_of(*trainee.reducer()).bytes;
      value.backward();
      losses.push_back(value.detach());
    }
    for (const auto& item : parameters) same(item.value().grad(), c10::str("grads/", step, "/", item.key()));
    optimizer.step();
    for (const auto& item : parameters) same(item.value().detach(), c10::str("parameters/", step, "/", item.key()));
  }
  same(torch::stack(losses), "losses");
  EXPECT_EQ(first_bytes, answer.texts.at(key + "bucket_sizes"));
  const auto rebuilt = texts_of(*trainee.reducer());
  EXPECT_EQ(trainee.reducer()->rebuilt(), !c.unused);
  EXPECT_GE(trainee.reducer()->buckets().size(), 3u);
  EXPECT_EQ(trainee.reducer()->rebuilt() ? rebuilt.bytes : "", answer.texts.at(key + "rebuilt_bucket_sizes"));
  EXPECT_EQ(trainee.reducer()->rebuilt() ? rebuilt.indices : "",
            answer.texts.at(key + "rebuilt_per_bucket_param_indices"));
}

TEST(DataParallelParity, TrainsAsPyTorchDoes) {
  const auto question = make_question();
  const Answer answer = parity::ask_python("data_parallel.py", question);
  SKIP_UNLESS_ANSWERED(answer);
  for (const auto& c : kCases)
    for (const int64_t n : c.ranks)
      run_ranks(n, [&](Rank& me) {
        if (c.model == "gpt2")
          train(
              models::GPT2(kGpt), c, me, question, answer,
              [](auto& model, const at::Tensor& x, int64_t) { return model(x); }, models::loss);
        else
          train(
              Net(), c, me, question, answer,
              [](auto& model, const at::Tensor& x, int64_t branches) { return model(x, branches); },
              [](const at::Tensor& y, const at::Tensor& target) { return torch::mse_loss(y, target); });
      });
}

// The mean over ranks of the means over their batches is the mean over everything: no PyTorch needed to know.
TEST(DataParallelParity, TrainsAsOneRankOnTheWholeBatch) {
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
  auto whole = clone(start);
  train(whole, 0, 1);
  const auto wanted = whole->parameters();
  ASSERT_NE(close(start->parameters(), wanted, {0, 1e-2}), "");  // it has learned something
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
