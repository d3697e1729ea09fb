// JSON: the text of a value parses to the same value.
#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"

#include "fuzz_targets.h"

namespace tessera::fuzz {
namespace {

// Calls an accessor that throws UsageError for a value of another type.
template <class F>
void try_access(F f) {
  try {
    f();
  } catch (const UsageError&) {
  }
}

}  // namespace

void fuzz_json(std::string_view input) {
  Json json;
  try {
    json = Json::parse(input, "the input");
  } catch (const UsageError&) {
    return;
  }
  const auto text = json.dump();
  require(Json::parse(text, "what dump() wrote").dump() == text, "the text of a value has another text: ", text);
  try_access([&] { json.numbers(); });
  try_access([&] { json.at("a").text(); });
  try_access([&] {
    for (const auto& [key, value] : json.members()) require(json.find(key) != nullptr, "no member ", key);
  });
}

}  // namespace tessera::fuzz
