#pragma once
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/sizes.h"

#include <memory>
#include <variant>
#include <vector>

namespace tessera::train {

// One of the models that can be trained. A handle; copies share.
using Network = std::variant<models::GPT2, models::Llama>;

Network make_network(const models::Config& config);
torch::nn::Module& module_of(const Network& network);
// The layers, first to last: what is gathered, and computed again, one at a time.
std::vector<std::shared_ptr<torch::nn::Module>> blocks_of(const Network& network);
at::Tensor logits_of(Network& network, const at::Tensor& tokens);  // (B, T) -> (B, T, vocab)

// Multiplications and additions of forward and backward for one token, as torchtitan counts them: six for each
// parameter that multiplies, and attention's.
double flops_per_token(const models::Config& config, int64_t length);

}  // namespace tessera::train
