#include "tessera/checkpoint/detail/hugging_face.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>

namespace tessera::dcp {
namespace {

enum class WeightChange : uint8_t {
  None,
  Transpose,
  RotateQ,  // the order of a head's rows
  RotateK,
  Stack,     // of experts
  LeaveOut,  // exists only there
};

struct WeightRow {
  const char* families;  // "gpt2", or several
  const char* ours;      // {} is a layer
  const char* theirs;    // {} is a layer, {e} an expert
  WeightChange change = WeightChange::None;
};

constexpr WeightRow kWeights[] = {
    {"gpt2", "wte.weight", "transformer.wte.weight"},
    {"gpt2", "wpe.weight", "transformer.wpe.weight"},
    {"gpt2", "h.{}.ln_1.weight", "transformer.h.{}.ln_1.weight"},
    {"gpt2", "h.{}.ln_1.bias", "transformer.h.{}.ln_1.bias"},
    {"gpt2", "h.{}.attn.c_attn.weight", "transformer.h.{}.attn.c_attn.weight", WeightChange::Transpose},
    {"gpt2", "h.{}.attn.c_attn.bias", "transformer.h.{}.attn.c_attn.bias"},
    {"gpt2", "h.{}.attn.c_proj.weight", "transformer.h.{}.attn.c_proj.weight", WeightChange::Transpose},
    {"gpt2", "h.{}.attn.c_proj.bias", "transformer.h.{}.attn.c_proj.bias"},
    {"gpt2", "h.{}.ln_2.weight", "transformer.h.{}.ln_2.weight"},
    {"gpt2", "h.{}.ln_2.bias", "transformer.h.{}.ln_2.bias"},
    {"gpt2", "h.{}.mlp.c_fc.weight", "transformer.h.{}.mlp.c_fc.weight", WeightChange::Transpose},
    {"gpt2", "h.{}.mlp.c_fc.bias", "transformer.h.{}.mlp.c_fc.bias"},
    {"gpt2", "h.{}.mlp.c_proj.weight", "transformer.h.{}.mlp.c_proj.weight", WeightChange::Transpose},
    {"gpt2", "h.{}.mlp.c_proj.bias", "transformer.h.{}.mlp.c_proj.bias"},
    {"gpt2", "ln_f.weight", "transformer.ln_f.weight"},
    {"gpt2", "ln_f.bias", "transformer.ln_f.bias"},
    {"gpt2", "", "transformer.h.{}.attn.bias", WeightChange::LeaveOut},  // the causal mask
    {"gpt2", "", "transformer.h.{}.attn.masked_bias", WeightChange::LeaveOut},
    {"gpt2", "", "lm_head.weight", WeightChange::LeaveOut},  // is wte.weight

    {"llama mixtral", "tok_embeddings.weight", "model.embed_tokens.weight"},
    {"llama mixtral", "layers.{}.attention.wq.weight", "model.layers.{}.self_attn.q_proj.weight",
     WeightChange::RotateQ},
    {"llama mixtral", "layers.{}.attention.wk.weight", "model.layers.{}.self_attn.k_proj.weight",
     WeightChange::RotateK},
    {"llama mixtral", "layers.{}.attention.wv.weight", "model.layers.{}.self_attn.v_proj.weight"},
    {"llama mixtral", "layers.{}.attention.wo.weight", "model.layers.{}.self_attn.o_proj.weight"},
    {"llama mixtral", "layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight"},
    {"llama mixtral", "layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"},
    {"llama", "layers.{}.feed_forward.w1.weight", "model.layers.{}.mlp.gate_proj.weight"},
    {"llama", "layers.{}.feed_forward.w2.weight", "model.layers.{}.mlp.down_proj.weight"},
    {"llama", "layers.{}.feed_forward.w3.weight", "model.layers.{}.mlp.up_proj.weight"},
    {"mixtral", "layers.{}.moe.gate.weight", "model.layers.{}.block_sparse_moe.gate.weight"},
    {"mixtral", "layers.{}.moe.w1", "model.layers.{}.block_sparse_moe.experts.{e}.w1.weight", WeightChange::Stack},
    {"mixtral", "layers.{}.moe.w2", "model.layers.{}.block_sparse_moe.experts.{e}.w2.weight", WeightChange::Stack},
    {"mixtral", "layers.{}.moe.w3", "model.layers.{}.block_sparse_moe.experts.{e}.w3.weight", WeightChange::Stack},
    {"llama mixtral", "norm.weight", "model.norm.weight"},
    {"llama mixtral", "output.weight", "lm_head.weight"},
    {"llama mixtral", "", "model.layers.{}.self_attn.rotary_emb.inv_freq", WeightChange::LeaveOut},
};

bool is_of(const WeightRow& row, const std::string& family) {
  return c10::str(" ", row.families, " ").find(" " + family + " ") != std::string::npos;
}

// The numbers in the places of {} and {e}.
struct NameMatch {
  std::string layer, expert;
};

std::optional<NameMatch> match_name(std::string_view pattern, std::string_view name) {
  NameMatch match;
  while (!pattern.empty()) {
    if (pattern.front() != '{') {
      if (name.empty() || name.front() != pattern.front()) return std::nullopt;
      pattern.remove_prefix(1), name.remove_prefix(1);
      continue;
    }
    auto& number = pattern.starts_with("{e}") ? match.expert : match.layer;
    pattern.remove_prefix(pattern.find('}') + 1);
    while (!name.empty() && name.front() >= '0' && name.front() <= '9') number += name.front(), name.remove_prefix(1);
    if (number.empty()) return std::nullopt;
  }
  return name.empty() ? std::optional(match) : std::nullopt;
}

std::string fill_name(std::string pattern, const NameMatch& match) {
  for (const auto& [place, number] : {std::pair<std::string, std::string>{"{}", match.layer}, {"{e}", match.expert}})
    if (const auto at = pattern.find(place); at != pattern.npos) pattern.replace(at, place.size(), number);
  return pattern;
}

struct FoundRow {
  const WeightRow* row;
  NameMatch match;
};

FoundRow find_row(const std::string& name, const std::string& family, const char* WeightRow::*side) {
  std::vector<std::string> known;
  for (const auto& row : kWeights) {
    if (!is_of(row, family) || !*(row.*side)) continue;
    if (auto match = match_name(row.*side, name)) return {&row, *match};
    known.push_back(row.*side);
  }
  TESSERA_FAIL(UsageError, "'", name, "' is not a weight of ", family, "; ",
               did_you_mean(name, known).empty() ? "use --prefix to choose the weights of the model"
                                                 : did_you_mean(name, known));
}

// Rows of a head: pairs (2i, 2i + 1) to (i, i + D/2), or back.
at::Tensor change_pairs(const std::string& name, const at::Tensor& weight, int64_t heads, bool to_halves) {
  TESSERA_CHECK(heads > 0, UsageError, "the number of heads is needed for '", name, "'; give --heads and --kv-heads");
  TESSERA_CHECK(weight.dim() >= 1 && weight.size(0) % (2 * heads) == 0, UsageError, "'", name, "' ", weight.sizes(),
                " does not have an even number of rows for each of ", heads, " heads");
  const int64_t half = weight.size(0) / heads / 2;
  const auto grouped =
      weight.unflatten(0, to_halves ? std::vector<int64_t>{heads, half, 2} : std::vector<int64_t>{heads, 2, half});
  return grouped.transpose(1, 2).flatten(0, 2).contiguous();
}

at::Tensor changed(const std::string& name, const at::Tensor& weight, WeightChange change,
                   const HuggingFaceModel& model, bool to_theirs) {
  if (change == WeightChange::Transpose) return weight.t().contiguous();
  if (change == WeightChange::RotateQ) return change_pairs(name, weight, model.heads, to_theirs);
  if (change == WeightChange::RotateK) return change_pairs(name, weight, model.kv_heads, to_theirs);
  return weight;
}

void check_family(const HuggingFaceModel& model) {
  TESSERA_CHECK(
      std::any_of(std::begin(kWeights), std::end(kWeights), [&](const auto& r) { return is_of(r, model.family); }),
      UsageError, "'", model.family, "' is not a known family of models; write gpt2, llama or mixtral");
}

}  // namespace

HuggingFaceModel read_hugging_face_config(const std::string& path) {
  const auto json = Json::parse(read_text_file(path, "the model's config"), path);
  const auto number = [&](const char* name, int64_t otherwise) {
    const auto* found = json.find(name);
    return found ? found->number() : otherwise;
  };
  const auto* type = json.find("model_type");
  TESSERA_CHECK(type && type->get_if<std::string>(), UsageError, path, " has no model_type");
  HuggingFaceModel model{type->text(), number("num_attention_heads", 0), 0};
  model.kv_heads = number("num_key_value_heads", model.heads);
  check_family(model);
  return model;
}

NamedTensors from_hugging_face(const NamedTensors& tensors, const HuggingFaceModel& model) {
  const at::NoGradGuard no_grad;
  check_family(model);
  NamedTensors result;
  std::map<std::string, std::map<int64_t, at::Tensor>> experts;  // by our name
  for (const auto& [given, tensor] : tensors) {
    auto name = given;
    // The files of gpt2 have no prefix.
    if (model.family == "gpt2" && !name.starts_with("transformer.") && name != "lm_head.weight")
      name = "transformer." + name;
    const auto [row, match] = find_row(name, model.family, &WeightRow::theirs);
    if (row->change == WeightChange::LeaveOut) continue;
    const auto ours = fill_name(row->ours, match);
    if (row->change == WeightChange::Stack) {
      if (experts[ours].empty()) result.emplace_back(ours, at::Tensor());
      experts[ours].emplace(std::stoll(match.expert), tensor);
    } else {
      result.emplace_back(ours, changed(given, tensor, row->change, model, /*to_theirs=*/false));
    }
  }
  for (auto& [name, tensor] : result) {
    if (tensor.defined()) continue;
    std::vector<at::Tensor> parts;
    for (const auto& [number, part] : experts.at(name)) {
      TESSERA_CHECK(number == static_cast<int64_t>(parts.size()), UsageError, "expert ", parts.size(), " of '", name,
                    "' is missing");
      parts.push_back(part);
    }
    tensor = at::stack(parts);
  }
  return result;
}

NamedTensors to_hugging_face(const NamedTensors& tensors, const HuggingFaceModel& model) {
  const at::NoGradGuard no_grad;
  check_family(model);
  NamedTensors result;
  for (const auto& [name, tensor] : tensors) {
    if (name.ends_with(".moe.expert_bias")) continue;  // balances experts in training; Mixtral has none
    const auto [row, found] = find_row(name, model.family, &WeightRow::ours);
    auto match = found;
    if (row->change != WeightChange::Stack) {
      result.emplace_back(fill_name(row->theirs, match), changed(name, tensor, row->change, model, /*to_theirs=*/true));
      continue;
    }
    for (int64_t e = 0; e < tensor.size(0); e++) {
      match.expert = std::to_string(e);
      result.emplace_back(fill_name(row->theirs, match), tensor.select(0, e).contiguous());
    }
  }
  return result;
}

}  // namespace tessera::dcp
