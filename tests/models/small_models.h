#pragma once
#include "tessera/models/detail/model_config.h"

// Configurations of small models that the tests share. Their heads can be sharded over 1, 2, 3 and 6 ranks.
namespace tessera::models::test {

inline const GPT2Config kGpt{.vocab_size = 24, .max_seq_len = 8, .n_layer = 2, .n_head = 6, .n_embd = 24};
inline const LlamaConfig kLlama{
    .vocab_size = 24, .max_seq_len = 8, .n_layers = 2, .n_heads = 12, .n_kv_heads = 6, .dim = 48, .ffn_dim = 60};

}  // namespace tessera::models::test
