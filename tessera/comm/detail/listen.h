#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace tessera::comm::detail {

// Returns when a process listens at host:port. (c10d's own wait tries once per second and prints many warnings.)
// Throws CommError after `timeout`.
void wait_for_listener(const std::string& host, int64_t port, std::chrono::milliseconds timeout);

// Whether all addresses of the host are loopback addresses. Throws UsageError if it has none.
bool is_loopback(const std::string& host);

}  // namespace tessera::comm::detail
