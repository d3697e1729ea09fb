// The text of a tensor-parallel plan parses to the same plan. Patterns can be matched with module names.
#include "tessera/base/error.h"
#include "tessera/tensor_parallel/plan.h"

#include "fuzz_targets.h"

namespace tessera::fuzz {

void fuzz_plan(std::string_view input) {
  Plan plan;
  try {
    plan = parse_plan(input);
  } catch (const UsageError&) {
    return;
  }
  const auto text = to_string(plan);
  require(parse_plan(text) == plan, "the text is another plan:\n", text);
  for (const auto& entry : plan)
    require(parse_style(to_string(entry.style)) == entry.style, "the text is another style: ", to_string(entry.style));
  try {
    resolve(plan, {"", "layers", "layers.0", "layers.0.attn", "layers.0.attn.wq", "layers.0.attn.wk", "norm"});
  } catch (const UsageError&) {
  }
}

}  // namespace tessera::fuzz
