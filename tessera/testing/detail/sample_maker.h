#pragma once
#include "tessera/testing/rule_oracle.h"

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <vector>

// Samples for the rule oracle.
namespace tessera::testing {

at::Tensor numbers(c10::IntArrayRef sizes);                      // doubles from 0.1 to 0.9, the same in every call
at::Tensor integers(c10::IntArrayRef sizes, int64_t below = 5);  // int64, from 0
at::Tensor mask(c10::IntArrayRef sizes);                         // booleans

// Samples from the schema of an op whose tensors have equal or broadcast sizes: elementwise and foreach ops. One sample
// has equal sizes and one has transposed strides. If the op is not a backward, one has a broadcast operand and one a
// plain tensor of one element.
std::vector<Sample> samples_by_schema(const std::string& op);

}  // namespace tessera::testing
