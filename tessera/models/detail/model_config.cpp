#include "tessera/models/detail/model_config.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <ostream>

namespace tessera::models {
namespace {

struct SizeField {
  const char* name;
  int64_t value;
};

template <class Config>
void check_positive(const Config& config, std::initializer_list<SizeField> fields) {
  for (const auto& field : fields)
    TESSERA_CHECK(field.value > 0, UsageError, field.name, " is ", field.value, " and must be positive, in ", config);
}

}  // namespace

void check(const GPT2Config& c) {
  check_positive(c, {{"vocab_size", c.vocab_size},
                     {"max_seq_len", c.max_seq_len},
                     {"n_layer", c.n_layer},
                     {"n_head", c.n_head},
                     {"n_embd", c.n_embd}});
  TESSERA_CHECK(c.n_embd % c.n_head == 0, UsageError, "n_embd ", c.n_embd, " is not a multiple of n_head ", c.n_head,
                ", in ", c);
  TESSERA_CHECK(c.dropout >= 0 && c.dropout < 1, UsageError, "dropout is ", c.dropout, " and must be in [0, 1), in ",
                c);
}

void check(const LlamaConfig& c) {
  check_positive(c, {{"vocab_size", c.vocab_size},
                     {"max_seq_len", c.max_seq_len},
                     {"n_layers", c.n_layers},
                     {"n_heads", c.n_heads},
                     {"n_kv_heads", c.n_kv_heads},
                     {"dim", c.dim},
                     {"ffn_dim", c.ffn_dim}});
  TESSERA_CHECK(c.dim % (2 * c.n_heads) == 0, UsageError, "dim ", c.dim, " is not a multiple of 2 x n_heads ",
                c.n_heads, ": rotary embeddings rotate pairs of features of a head, in ", c);
  TESSERA_CHECK(c.n_heads % c.n_kv_heads == 0, UsageError, "n_heads ", c.n_heads, " is not a multiple of n_kv_heads ",
                c.n_kv_heads, ", in ", c);
  const MoEConfig& moe = c.moe;
  TESSERA_CHECK(moe.n_experts >= 0 && moe.n_shared_experts >= 0, UsageError, "n_experts and n_shared_experts must not ",
                "be negative, in ", c);
  if (moe.n_experts == 0) return;
  TESSERA_CHECK(moe.top_k >= 1 && moe.top_k <= moe.n_experts, UsageError, "top_k is ", moe.top_k,
                " and must be in 1 to n_experts ", moe.n_experts, ", in ", c);
  TESSERA_CHECK(moe.capacity_factor >= 0 && moe.aux_loss_weight >= 0 && moe.bias_update_rate >= 0, UsageError,
                "capacity_factor, aux_loss_weight and bias_update_rate must not be negative, in ", c);
}

int64_t parameter_count(const GPT2Config& c) {
  const int64_t d = c.n_embd, b = c.bias ? 1 : 0;
  const int64_t norm = 2 * d;
  const int64_t attention = 3 * d * d + b * 3 * d + d * d + b * d;
  const int64_t mlp = 4 * d * d + b * 4 * d + 4 * d * d + b * d;
  return (c.vocab_size + c.max_seq_len) * d + c.n_layer * (2 * norm + attention + mlp) + norm;
}

int64_t parameter_count(const LlamaConfig& c) {
  const int64_t kv_width = c.n_kv_heads * c.head_dim();
  const int64_t attention = 2 * c.dim * c.dim + 2 * c.dim * kv_width;
  const int64_t feed_forwards = std::max<int64_t>(c.moe.n_experts + c.moe.n_shared_experts, 1);
  const int64_t router = c.moe.n_experts * c.dim;
  const int64_t layer = attention + feed_forwards * 3 * c.dim * c.ffn_dim + router + 2 * c.dim;
  return (c.tied ? 1 : 2) * c.vocab_size * c.dim + c.n_layers * layer + c.dim;
}

std::ostream& operator<<(std::ostream& out, const GPT2Config& c) {
  return out << "GPT2(vocab_size=" << c.vocab_size << ", max_seq_len=" << c.max_seq_len << ", n_layer=" << c.n_layer
             << ", n_head=" << c.n_head << ", n_embd=" << c.n_embd << ", bias=" << c.bias << ", dropout=" << c.dropout
             << ")";
}

std::ostream& operator<<(std::ostream& out, const LlamaConfig& c) {
  out << "Llama(vocab_size=" << c.vocab_size << ", max_seq_len=" << c.max_seq_len << ", n_layers=" << c.n_layers
      << ", n_heads=" << c.n_heads << ", n_kv_heads=" << c.n_kv_heads << ", dim=" << c.dim << ", ffn_dim=" << c.ffn_dim
      << ", rope_theta=" << c.rope_theta << ", tied=" << c.tied;
  if (c.moe.n_experts > 0)
    out << ", n_experts=" << c.moe.n_experts << ", top_k=" << c.moe.top_k
        << ", n_shared_experts=" << c.moe.n_shared_experts << ", capacity_factor=" << c.moe.capacity_factor
        << ", aux_loss_weight=" << c.moe.aux_loss_weight << ", bias_update_rate=" << c.moe.bias_update_rate;
  return out << ")";
}

}  // namespace tessera::models
