#pragma once
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/mlp.h"
#include "tessera/testing/assert_close.h"
#include "tests/data_parallel/batches.h"

#include <gtest/gtest.h>

// What the tests of fully_shard share: a stack of equal layers, each a unit, and a plain one that tells what is right.
namespace tessera::data_parallel {

inline at::Tensor whole(const at::Tensor& t) { return is_dtensor(t) ? DTensor(t.detach()).full_tensor() : t.detach(); }

inline at::Tensor stack_loss(models::MLPStacked& model, const at::Tensor& batch) { return model(batch).pow(2).mean(); }

inline void shard_layers(models::MLPStacked& model, const FullyShardOptions& options) {
  for (auto& layer : model->layers) fully_shard(layer, options);
  fully_shard(model, options);
}

inline void expect_sharded(const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters()) EXPECT_TRUE(is_dtensor(item.value())) << item.key();
}

// Values of gradients, and that each lies like its parameter. One that is missing must be missing on both sides.
inline void expect_gradients(const torch::nn::Module& found, const torch::nn::Module& wanted,
                             testing::Tolerance tolerance = {1e-4, 1e-5}) {
  const auto plain = wanted.named_parameters();
  for (const auto& item : found.named_parameters()) {
    const auto& gradient = item.value().grad();
    ASSERT_EQ(gradient.defined(), plain[item.key()].grad().defined()) << item.key();
    if (!gradient.defined()) continue;
    EXPECT_EQ(DTensor(gradient).placements(), DTensor(item.value()).placements()) << item.key();
    EXPECT_EQ(testing::close(whole(gradient), plain[item.key()].grad(), tolerance), "") << item.key();
  }
}

inline void zero_grad(const torch::nn::Module& module) {
  for (const auto& p : module.parameters()) p.mutable_grad().reset();
}

}  // namespace tessera::data_parallel
