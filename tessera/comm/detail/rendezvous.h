#pragma once
#include "tessera/comm/environment.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace tessera::comm::detail {

struct RendezvousOptions {
  std::string method;  // "env://", "file:///path", "tcp://host:port"
  int64_t rank = 0, size = 1;
  std::chrono::milliseconds timeout{0};
};

// Opens the store over which the ranks of a world find each other. For env:// the address comes from `environment`.
// An env:// world is checked: two processes with the same rank, or with different world sizes, get an error at once.
c10::intrusive_ptr<c10d::Store> open_store(const RendezvousOptions& options, const Environment& environment);

// A TCPStore whose server runs in this process. Port 0: any free port, which `port_found` receives.
c10::intrusive_ptr<c10d::Store> host_tcp_store(const std::string& host, int64_t port, std::chrono::milliseconds timeout,
                                               int64_t& port_found);

// A TCPStore. `server`: its server runs in this process.
c10::intrusive_ptr<c10d::Store> tcp_store(const std::string& host, int64_t port, bool server,
                                          std::chrono::milliseconds timeout);

}  // namespace tessera::comm::detail
