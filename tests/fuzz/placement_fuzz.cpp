// "[S(0), R]": the text of placements parses to the same placements.
#include "tessera/base/error.h"
#include "tessera/placement/placement.h"

#include "fuzz_targets.h"

namespace tessera::fuzz {

void fuzz_placement(std::string_view input) {
  Placements placements;
  try {
    placements = parse_placements(input);
  } catch (const UsageError&) {
    return;
  }
  const auto text = to_string(placements);
  require(parse_placements(text) == placements, "the text is other placements: ", text);
  for (const auto& each : placements)
    require(parse_placement(to_string(each)) == each, "the text is another placement: ", to_string(each));
  for (const int64_t ndim : {0, 1, 4, 64}) {
    try {
      for (const auto& each : normalize(placements, ndim))
        require(!each.is_sharded() || (each.dim >= 0 && each.dim < ndim), text, " of ", ndim, " dims has ", each);
    } catch (const UsageError&) {
    }
  }
}

}  // namespace tessera::fuzz
