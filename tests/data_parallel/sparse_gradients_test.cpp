// Embeddings with sparse(true) under DistributedDataParallel and replicate: gradients stay sparse, and are the mean of
// the ranks' gradients. tests/parity/data_parallel_test.cpp compares with PyTorch.
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/testing/expect_error.h"
#include "tests/fixtures/data_parallel.h"

namespace tessera {
namespace {

using namespace fixtures;

// `tied`: the embedding is used as a matrix too, so its gradient is dense.
struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(bool only_embedding, bool bag = false) {
    const auto table = torch::sin(torch::arange(40).view({10, 4}) * 1.7);
    if (bag)
      words_bag = register_module(
          "words", torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(10, 4).mode(torch::kSum).sparse(true)));
    else
      words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true)));
    if (!only_embedding) linear = register_module("linear", torch::nn::Linear(4, 1));
    const torch::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(torch::sin(torch::arange(p.numel()) * 1.7 + 1).view_as(p));
  }
  at::Tensor forward(const at::Tensor& x, bool tied = false) {
    auto y = words ? words(x) : words_bag(x.view({-1, 1}));
    if (tied) return torch::matmul(y, words->weight.t());
    return linear ? linear(y) : y;
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::EmbeddingBag words_bag{nullptr};
  torch::nn::Linear linear{nullptr};
};
TESSERA_MODULE(Words);

// Ranks read other words, and different numbers of them; rank 1 reads one word twice.
at::Tensor words_of(int64_t rank) {
  return torch::tensor(rank == 0 ? std::vector<int64_t>{1, 2, 9} : std::vector<int64_t>{2, 2, 5 + rank, 0});
}

TEST(SparseGradients, AreTheMeanOfTheRanks) {
  for (const int64_t n : {1, 2, 3})
    for (const bool only_embedding : {false, true})
      for (const bool bag : {false, true})
        run_ranks(n, [&](Rank& me) {
          Words model(only_embedding, bag), plain(only_embedding, bag);
          DistributedDataParallel ddp(model);
          for (int pass = 0; pass < 3; pass++) {  // the buckets are rebuilt after the first
            model->zero_grad();
            plain->zero_grad();
            ddp(words_of(me.rank)).pow(2).sum().backward();
            for (int64_t r = 0; r < n; r++) (plain(words_of(r)).pow(2).sum() / n).backward();
            const auto expected = plain->named_parameters();
            for (const auto& item : model->named_parameters()) {
              const auto& gradient = item.value().grad();
              EXPECT_EQ(gradient.is_sparse(), item.key() == "words.weight");
              EXPECT_TRUE(torch::allclose(gradient.to_dense(), expected[item.key()].grad().to_dense(), 1e-5, 1e-6))
                  << item.key() << " pass " << pass << " ranks " << n;
            }
          }
        });
}

TEST(SparseGradients, RankWithoutThem) {
  run_ranks(2, [](Rank& me) {
    Words model(false);
    DistributedDataParallel ddp(model, {.find_unused_parameters = true});
    auto x = ddp(words_of(1));
    if (me.rank == 0) x = model->linear(torch::ones({1, 4}));
    x.sum().backward();
    auto reference = Words(false);
    (reference(words_of(1)).sum() / 2).backward();
    EXPECT_TRUE(torch::allclose(model->words->weight.grad().to_dense(), reference->words->weight.grad().to_dense()));
  });
}

TEST(SparseGradients, ReplicateAndFrozen) {
  run_ranks(2, [](Rank& me) {
    Words model(false);
    replicate(model);
    model(words_of(me.rank)).sum().backward();
    EXPECT_TRUE(model->words->weight.grad().is_sparse());
    model->zero_grad();
    model->words->weight.requires_grad_(false);
    model(words_of(me.rank)).sum().backward();
    EXPECT_FALSE(model->words->weight.grad().defined());
  });
}

TEST(SparseGradients, ADenseGradientIsAnError) {
  run_ranks(2, [](Rank& me) {
    Words model(false);
    DistributedDataParallel ddp(model, {.find_unused_parameters = true});
    EXPECT_ERROR(UsageError, ddp(words_of(me.rank), true).sum().backward(), "words.weight", "sparse(false)");
  });
}

TEST(SparseGradients, CompileRefuses) {
  run_ranks(2, [](Rank& me) {
    Words model(false);
    DistributedDataParallel ddp(model);
    auto step = compile([&](const at::Tensor& x) {
      auto loss = ddp(x).sum();
      loss.backward();
      return loss.detach();
    });
    EXPECT_ERROR(UsageError, step(words_of(me.rank)), "sparse(false)");
  });
}

}  // namespace
}  // namespace tessera
