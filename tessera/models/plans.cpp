#include "tessera/models/sizes.h"

#include <string>

namespace tessera::models {
namespace {

// wpe is replicated. c_attn contains query, key and value, and each section is sharded separately.
constexpr const char* kGPT2 = R"(
wte             = rowwise(input=R)
h.*.attn.c_attn = colwise(sections=3)
h.*.attn.c_proj = rowwise
h.*.mlp.c_fc    = colwise
h.*.mlp.c_proj  = rowwise
)";
// Activations stay DTensors between modules, so the sequence length need not be divisible by the number of ranks. The
// rows of wpe are positions: sharding them shards the sequence.
constexpr const char* kGPT2Sequence = R"(
wte             = rowwise(input=R, output=S(1), local=false)
wpe             = rowwise(input=R, output=S(0), local=false)
h.*.ln_1        = sequence
h.*.attn        = prepare_input(from=S(1), to=R)
h.*.attn.c_attn = colwise(sections=3)
h.*.attn.c_proj = rowwise(output=S(1), local=false)
h.*.ln_2        = sequence
h.*.mlp         = prepare_input(from=S(1), to=R)
h.*.mlp.c_fc    = colwise
h.*.mlp.c_proj  = rowwise(output=S(1), local=false)
ln_f            = sequence
)";

// One prepare_input for an input that several Linears share: its gradient is all-reduced once.
constexpr const char* kLlamaAttention = R"(
tok_embeddings             = rowwise(input=R)
layers.*.attention         = prepare_input(from=[R, _], to=[R, _])
layers.*.attention.w[qkv]  = colwise
layers.*.attention.wo      = rowwise
)";
constexpr const char* kLlamaFeedForward = R"(
layers.*.feed_forward       = prepare_input(from=R, to=R)
layers.*.feed_forward.w[13] = colwise
layers.*.feed_forward.w2    = rowwise
)";
constexpr const char* kLlamaAttentionSequence = R"(
tok_embeddings              = rowwise(input=R, output=S(1), local=false)
layers.*.attention_norm     = sequence
layers.*.attention          = prepare_input(from=[S(1), _], to=[R, _])
layers.*.attention.w[qkv]   = colwise
layers.*.attention.wo       = rowwise(output=S(1), local=false)
layers.*.ffn_norm           = sequence
norm                        = sequence
)";
constexpr const char* kLlamaFeedForwardSequence = R"(
layers.*.feed_forward       = prepare_input(from=S(1), to=R)
layers.*.feed_forward.w[13] = colwise
layers.*.feed_forward.w2    = rowwise(output=S(1), local=false)
)";
// A mixture of experts in place of the feed-forward network is replicated over tp: every rank computes all of its
// tokens. Along the sequence, they are gathered before it.
constexpr const char* kExpertsSequence = R"(
layers.*.moe                = prepare_input_output(input_from=S(1), input_to=R, input_local=true, output_from=R, output_to=S(1), output_local=false)
)";

// The plan entry of a tied head, whose weight is sharded along the vocabulary.
std::string tied_head(const std::string& name, const PlanOptions& options) {
  const std::string input = options.sequence_parallel ? "S(1)" : "R";
  const std::string output = options.loss_parallel ? "output_to=S(-1), output_local=false" : "output_to=R";
  return name + " = prepare_input_output(input_from=[" + input + ", _], input_to=[R, _], output_from=S(-1), " + output +
         ")\n";
}
// The plan entry of a head with a weight of its own.
std::string untied_head(const std::string& name, const PlanOptions& options) {
  const std::string input = options.sequence_parallel ? "input=S(1), " : "";
  return name + " = colwise(" + input + (options.loss_parallel ? "local=false" : "output=R") + ")\n";
}

}  // namespace

Plan tensor_parallel_plan(const GPT2Config&, const PlanOptions& options) {
  return parse_plan((options.sequence_parallel ? kGPT2Sequence : kGPT2) + tied_head("lm_head", options));
}

Plan tensor_parallel_plan(const LlamaConfig& config, const PlanOptions& options) {
  const bool experts = config.moe.n_experts > 0;
  std::string text = options.sequence_parallel ? kLlamaAttentionSequence : kLlamaAttention;
  if (options.sequence_parallel)
    text += experts ? kExpertsSequence : kLlamaFeedForwardSequence;
  else if (!experts)
    text += kLlamaFeedForward;
  return parse_plan(text + (config.tied ? tied_head("output", options) : untied_head("output", options)));
}

Plan tensor_parallel_plan(const Config& config, const PlanOptions& options) {
  return std::visit([&](const auto& c) { return tensor_parallel_plan(c, options); }, config);
}

}  // namespace tessera::models
