#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace tessera::comm::detail {

// A socket that listens, to be handed to a TCPStore (masterListenFd), which then owns it. c10d's own would listen on
// every interface; this one listens on loopback alone where `host` is a name of loopback.
struct Listener {
  int fd = -1;
  uint16_t port = 0;
};

// Requires: 0 <= port < 65536; 0 is any port that is free.   Throws CommError if the port is taken, UsageError for a
// host without an address.
Listener listen_at(const std::string& host, int64_t port);

// Returns when somebody listens at host:port. c10d's own wait tries once a second and prints a page of warnings.
// Throws CommError after `timeout`.
void wait_for_listener(const std::string& host, int64_t port, std::chrono::milliseconds timeout);

bool is_loopback(const std::string& host);

}  // namespace tessera::comm::detail
