#pragma once
#include "run_python.h"
#include "tessera/models/detail/model_config.h"
#include "tessera/state/state_dict.h"

#include <c10/util/StringUtil.h>

#include <sstream>
#include <string>

// How a model, its data and counts of collectives travel to and from Python.
namespace tessera::models {

// The configuration in the form that models.py reads.
inline std::string settings(const GPT2Config& c) {
  return c10::str("GPT2 vocab_size=", c.vocab_size, " max_seq_len=", c.max_seq_len, " layers=", c.n_layer,
                  " heads=", c.n_head, " width=", c.n_embd, " bias=", c.bias);
}
inline std::string settings(const LlamaConfig& c) {
  return c10::str("Llama vocab_size=", c.vocab_size, " layers=", c.n_layers, " heads=", c.n_heads,
                  " kv_heads=", c.n_kv_heads, " width=", c.dim, " ffn=", c.ffn_dim, " theta=", c.rope_theta,
                  " tied=", c.tied);
}

// Adds configuration, weights and batch of a model to the request, under `name`.
template <class Model>
void add_model(parity::Message& request, const std::string& name, const Model& model, const at::Tensor& tokens,
               const at::Tensor& targets) {
  request.texts[name] = settings(model->config);
  request.tensors[name + "/tokens"] = tokens;
  request.tensors[name + "/targets"] = targets;
  for (const auto& [key, t] : state_dict(*model)) request.tensors[name + "/weights/" + key] = t.clone();
}

// Calls f(name, count) for each collective of "all_reduce=5 all_gather_into_tensor=1".
template <class F>
void read_counts(const std::string& text, F f) {
  std::istringstream in(text);
  for (std::string word; in >> word;) f(word.substr(0, word.find('=')), std::stoll(word.substr(word.find('=') + 1)));
}

}  // namespace tessera::models
