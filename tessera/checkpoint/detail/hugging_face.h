#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

// Weights of Hugging Face's GPT-2, Llama and Mixtral, and of tessera/models. A table has the names, and what else
// differs:
//   GPT-2     linear layers are Conv1D: their weights are transposed
//   Llama     a head's rotated pairs are (i, i + D/2), ours are (2i, 2i + 1): rows of wq and wk have another order
//   Mixtral   as Llama; each expert has its own tensors, ours are stacked
namespace tessera::dcp {

// Tensors by name, in order.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// What the names do not say.
struct HuggingFaceModel {
  std::string family;               // "gpt2", "llama" or "mixtral"
  int64_t heads = 0, kv_heads = 0;  // of Llama and Mixtral
};

// The family and the heads of a config.json of Hugging Face. Throws UsageError, with the path, for another family.
HuggingFaceModel read_hugging_face_config(const std::string& path);

// Renames and rearranges. Masks and copies of tied weights, which models of tessera/models do not have, are left out.
// Throws UsageError for a name that is not in the table, with similar ones, and for sizes that do not fit the heads.
NamedTensors from_hugging_face(const NamedTensors& tensors, const HuggingFaceModel& model);
NamedTensors to_hugging_face(const NamedTensors& tensors, const HuggingFaceModel& model);

}  // namespace tessera::dcp
