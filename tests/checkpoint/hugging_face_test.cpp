// Names and layouts of Hugging Face's GPT-2, Llama and Mixtral.
#include "tessera/checkpoint/detail/hugging_face.h"

#include "new_folder.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::dcp {
namespace {

at::Tensor numbers_of(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).sin().view(sizes);
}

void expect_round_trip(const NamedTensors& theirs, const HuggingFaceModel& model, size_t left_out = 0) {
  const auto again = to_hugging_face(from_hugging_face(theirs, model), model);
  ASSERT_EQ(again.size(), theirs.size() - left_out);
  for (const auto& [name, tensor] : again) {
    const auto found = std::find_if(theirs.begin(), theirs.end(), [&](const auto& t) { return t.first == name; });
    ASSERT_NE(found, theirs.end()) << name;
    EXPECT_TRUE(tensor.equal(found->second)) << name;
  }
}

TEST(HuggingFace, GPT2LinearLayersAreTransposed) {
  const NamedTensors theirs{{"transformer.wte.weight", numbers_of({7, 4})},
                            {"transformer.h.11.attn.c_attn.weight", numbers_of({4, 12})},
                            {"transformer.h.11.attn.c_attn.bias", numbers_of({12})},
                            {"transformer.h.11.attn.bias", at::ones({1, 1, 4, 4})},
                            {"lm_head.weight", numbers_of({7, 4})}};
  const auto ours = from_hugging_face(theirs, {.family = "gpt2"});
  ASSERT_EQ(ours.size(), 3u);
  EXPECT_EQ(ours[1].first, "h.11.attn.c_attn.weight");
  EXPECT_TRUE(ours[1].second.equal(theirs[1].second.t()));
  expect_round_trip(theirs, {.family = "gpt2"}, 2);
  // The files of the first release have no prefix.
  EXPECT_EQ(from_hugging_face({{"h.0.ln_1.bias", numbers_of({4})}}, {.family = "gpt2"})[0].first, "h.0.ln_1.bias");
}

// Rotates pairs (2i, 2i + 1), as tessera/models/detail/rope.h.
at::Tensor rotate_pairs(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {  // (T, H, D), (T, 1, D/2)
  const auto even = x.slice(-1, 0, {}, 2), odd = x.slice(-1, 1, {}, 2);
  return at::stack({even * cos - odd * sin, even * sin + odd * cos}, -1).flatten(-2);
}
// Rotates pairs (i, i + D/2): rotate_half of Hugging Face's Llama.
at::Tensor rotate_halves(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t half = x.size(-1) / 2;
  const auto first = x.narrow(-1, 0, half), second = x.narrow(-1, half, half);
  return at::cat({first * cos - second * sin, second * cos + first * sin}, -1);
}

// The scores of attention do not depend on whose order the weights have.
TEST(HuggingFace, LlamaHasTheSameScoresAfterReordering) {
  constexpr int64_t kDim = 24, kHeads = 4, kKvHeads = 2, kHead = 6, kTokens = 5;
  const HuggingFaceModel model{"llama", kHeads, kKvHeads};
  const auto q = numbers_of({kHeads * kHead, kDim}), k = numbers_of({kKvHeads * kHead, kDim}).cos();
  const auto ours = from_hugging_face(
      {{"model.layers.3.self_attn.q_proj.weight", q}, {"model.layers.3.self_attn.k_proj.weight", k}}, model);
  EXPECT_EQ(ours[0].first, "layers.3.attention.wq.weight");
  const auto x = numbers_of({kTokens, kDim});
  const auto angles = at::outer(at::arange(kTokens, at::kFloat), at::arange(1, 4, at::kFloat)).unsqueeze(1);
  const auto scores = [&](const at::Tensor& wq, const at::Tensor& wk, auto rotate) {
    const auto heads = [&](const at::Tensor& w, int64_t count) {
      return rotate(x.matmul(w.t()).view({kTokens, count, kHead}), angles.cos(), angles.sin()).transpose(0, 1);
    };
    return heads(wq, kHeads).matmul(heads(wk, kKvHeads).repeat_interleave(2, 0).transpose(1, 2));
  };
  EXPECT_TRUE(
      at::allclose(scores(ours[0].second, ours[1].second, rotate_pairs), scores(q, k, rotate_halves), 1e-4, 1e-4));
  EXPECT_FALSE(at::allclose(scores(q, k, rotate_pairs), scores(q, k, rotate_halves), 1e-2, 1e-2))
      << "the test sees order";
  expect_round_trip({{"model.layers.3.self_attn.q_proj.weight", q},
                     {"model.layers.3.self_attn.k_proj.weight", k},
                     {"model.layers.3.mlp.gate_proj.weight", numbers_of({5, 4})},
                     {"model.embed_tokens.weight", numbers_of({9, 4})},
                     {"lm_head.weight", numbers_of({9, 4})},
                     {"model.norm.weight", numbers_of({4})}},
                    model);
}

TEST(HuggingFace, MixtralExpertsAreStacked) {
  const HuggingFaceModel model{"mixtral", 2, 2};
  NamedTensors theirs{{"model.layers.0.block_sparse_moe.gate.weight", numbers_of({3, 4})}};
  for (const int64_t e : {2, 0, 1})  // in any order
    theirs.emplace_back(c10::str("model.layers.0.block_sparse_moe.experts.", e, ".w1.weight"),
                        numbers_of({5, 4}) + static_cast<double>(e));
  const auto ours = from_hugging_face(theirs, model);
  ASSERT_EQ(ours.size(), 2u);
  EXPECT_EQ(ours[1].first, "layers.0.moe.w1");
  EXPECT_EQ(ours[1].second.sizes(), at::IntArrayRef({3, 5, 4}));
  EXPECT_TRUE(ours[1].second[2].equal(theirs[1].second));
  expect_round_trip(theirs, model);
  theirs.erase(theirs.begin() + 2);
  EXPECT_ERROR(UsageError, from_hugging_face(theirs, model), "expert 0 of 'layers.0.moe.w1' is missing");
}

TEST(HuggingFace, WrongInputIsNamed) {
  EXPECT_ERROR(UsageError,
               from_hugging_face({{"model.layers.0.self_attn.q_pro.weight", at::ones({4, 4})}}, {"llama", 2, 2}),
               "'model.layers.0.self_attn.q_pro.weight' is not a weight of llama; did you mean");
  EXPECT_ERROR(UsageError, from_hugging_face({{"model.layers.0.self_attn.q_proj.weight", at::ones({4, 4})}}, {"llama"}),
               "give --heads");
  EXPECT_ERROR(UsageError,
               from_hugging_face({{"model.layers.0.self_attn.q_proj.weight", at::ones({6, 4})}}, {"llama", 2, 2}),
               "does not have an even number of rows for each of 2 heads");
  EXPECT_ERROR(UsageError, to_hugging_face({}, {"bert"}), "'bert' is not a known family");
  const NewFolder folder;
  write(folder / "config.json", R"({"model_type": "mixtral", "num_attention_heads": 32, "num_key_value_heads": 8})");
  const auto model = read_hugging_face_config(folder / "config.json");
  EXPECT_EQ(model.heads, 32);
  EXPECT_EQ(model.kv_heads, 8);
}

}  // namespace
}  // namespace tessera::dcp
