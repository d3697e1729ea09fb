#pragma once
#include "tessera/comm/environment.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace tessera::comm::detail {

struct Meeting {
  std::string method;  // "env://", "file:///path", "tcp://host:port"
  int64_t rank = 0, size = 1;
  std::chrono::milliseconds timeout{0};
};

// The store over which the ranks of a world find each other. `environment` says where, for env://.
// Every rank of an env:// world is checked in: two that say the same rank, or different sizes of the world, get an
// error instead of a wait.
c10::intrusive_ptr<c10d::Store> open_store(const Meeting& meeting, const Environment& environment);

// A store kept by this process. Port 0: one that is free; `port_found` says which.
c10::intrusive_ptr<c10d::Store> keep_store(const std::string& host, int64_t port, std::chrono::milliseconds timeout,
                                           int64_t& port_found);

// A TCPStore; `server`: kept by this process.
c10::intrusive_ptr<c10d::Store> tcp_store(const std::string& host, int64_t port, bool server,
                                          std::chrono::milliseconds timeout);

}  // namespace tessera::comm::detail
