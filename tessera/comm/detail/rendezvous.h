#pragma once
#include "tessera/comm/detail/hosts.h"
#include "tessera/comm/environment.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>

namespace tessera::comm::detail {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct RendezvousOptions {
  std::string method;  // "env://", "file:///path", "tcp://host:port"
  int64_t rank = 0, size = 1;
  std::chrono::milliseconds timeout{0};
};

struct Rendezvous {
  StorePtr store;
  std::function<AbsentRanks()> absent_ranks = {};  // null if the launcher is not `tessera run`
};

// Opens the store over which the ranks of a world find each other. For env:// the address comes from `environment`.
// An env:// world is checked: two processes with the same rank, or with different world sizes, get an error at once.
//
//   launcher hosts the store    `tessera run`: AuthenticatedStore; torchrun: c10d::TCPStore
//   rank 0 hosts the store      AuthenticatedStore. The secret is TESSERA_JOB_SECRET. Without it, ranks on one machine
//                               agree on one (local_rendezvous.h). Ranks on several machines use a public one: every
//                               process that reaches the port can join, and rank 0 warns.
Rendezvous open_store(const RendezvousOptions& options, const Environment& environment);

// The secret of a job without a secret. It is public.
extern const char* const kPublicSecret;

// An AuthenticatedStore whose server runs in this process. It listens on the address of `host` only. Port 0: any free
// port, which `port_found` receives.
StorePtr host_store(const std::string& host, int64_t port, const std::string& secret, std::chrono::milliseconds timeout,
                    int64_t& port_found);
// A client of such a store. Waits until it listens.
StorePtr join_store(const std::string& host, int64_t port, const std::string& secret,
                    std::chrono::milliseconds timeout);

// `tessera run` reports a rank that has ended, or is stopped, to ranks that wait for it to join. An empty text: it can
// join after all. The reports are kept in the launcher's store, per restart.
void report_absent_rank(c10d::Store& store, int64_t restarts, int64_t rank, const std::string& why);
AbsentRanks read_absent_ranks(c10d::Store& store, int64_t restarts);

}  // namespace tessera::comm::detail
