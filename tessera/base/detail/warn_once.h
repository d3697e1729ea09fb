#pragma once
#include <string>
#include <string_view>

namespace tessera {

// Warns through LibTorch's warning handler, once per key and process. The key names what is skipped or degraded, so two
// different things give two warnings. Do not use an address as the key: another object can have it later.
// Example:  warn_once("plan/attn.wq", "plan entry 'attn.wq' matches no module; it is ignored");
void warn_once(std::string_view key, const std::string& message);

}  // namespace tessera
