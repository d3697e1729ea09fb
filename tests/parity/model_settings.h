#pragma once
#include "tessera/models/detail/config.h"

#include <c10/util/StringUtil.h>

#include <string>

// Sizes of a model as models.py reads them.
namespace tessera::models {

inline std::string settings(const GPT2Config& c) {
  return c10::str("GPT2 vocab_size=", c.vocab_size, " max_seq_len=", c.max_seq_len, " layers=", c.n_layer,
                  " heads=", c.n_head, " width=", c.n_embd, " bias=", c.bias);
}
inline std::string settings(const LlamaConfig& c) {
  return c10::str("Llama vocab_size=", c.vocab_size, " layers=", c.n_layers, " heads=", c.n_heads,
                  " kv_heads=", c.n_kv_heads, " width=", c.dim, " ffn=", c.ffn_dim, " theta=", c.rope_theta,
                  " tied=", c.tied);
}

}  // namespace tessera::models
