#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace tessera::comm::detail {

// A listening socket for a TCPStore (masterListenFd), which then owns it. c10d's own socket listens on every interface.
// This one listens on loopback only, if `host` is a loopback address.
struct Listener {
  int fd = -1;
  uint16_t port = 0;
};

// Requires: 0 <= port < 65536; 0 means any free port.
// Throws CommError if the port is in use, UsageError if the host has no address.
Listener listen_at(const std::string& host, int64_t port);

// Returns when a process listens at host:port. (c10d's own wait tries once per second and prints many warnings.)
// Throws CommError after `timeout`.
void wait_for_listener(const std::string& host, int64_t port, std::chrono::milliseconds timeout);

bool is_loopback(const std::string& host);

}  // namespace tessera::comm::detail
