#pragma once
#include <string_view>

// Ops whose only strategy is all-Replicate, and why. Other ops without a rule are gathered too
// (propagate/detail/route.h); these are the ones for which it is decided.
namespace tessera::rules {

// The reason, or "" if the op is not listed.
std::string_view gathered_reason(std::string_view op);  // "aten::nonzero"

}  // namespace tessera::rules
