#pragma once
#include "tessera/rules/detail/rule.h"

// One function for each file of rules. all_rules.cpp calls all of them.
namespace tessera::rules {

void register_pointwise(Registry& to);
void register_copy(Registry& to);
void register_random(Registry& to);
void register_matmul(Registry& to);
void register_reduction(Registry& to);
void register_scan(Registry& to);
void register_view(Registry& to);
void register_view_backward(Registry& to);
void register_normalization(Registry& to);
void register_embedding(Registry& to);
void register_attention(Registry& to);
void register_convolution(Registry& to);
void register_loss(Registry& to);
void register_joining(Registry& to);
void register_indexing(Registry& to);
void register_arranging(Registry& to);
void register_factories(Registry& to);
void register_foreach(Registry& to);
void register_batch(Registry& to);
void register_decomposed(Registry& to);
void register_gathered(Registry& to);

}  // namespace tessera::rules
