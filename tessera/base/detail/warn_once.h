#pragma once
#include <string>
#include <string_view>

namespace tessera {

// Warns through LibTorch's warning handler, once per `key` and process. The key names the thing that was skipped or
// degraded, so that two things each get their line.
// Example:  warn_once("plan/attn.wq", "plan entry 'attn.wq' matches no module; it was ignored");
void warn_once(std::string_view key, const std::string& message);

}  // namespace tessera
