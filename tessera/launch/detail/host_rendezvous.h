#pragma once
#include "tessera/launch/detail/rank_plan.h"
#include "tessera/launch/detail/signals.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <optional>
#include <string>

namespace tessera::launch {

// The first failure of the job, as all hosts report it.
struct JobFailure {
  int exit_code = 1;
  bool restartable = true;  // false: a user or an unrecoverable error ends the job
  std::string text;
};

// Rendezvous of the launchers, one per host, through a store on node 0.
// - join() assigns ranks to hosts in the order of their node ranks.
// - The first failure on any host ends the worker group on all hosts.
// - No launcher ends before all hosts are done.
// The launchers use the prefix "/launch" of the store. The ranks use another one.
class HostRendezvous {
 public:
  struct Options {
    int64_t node_rank = 0, nnodes = 1, nproc_per_node = 1, max_restarts = 0;
    std::string host;        // name of this host
    std::string store_host;  // address of the store, as all hosts write it
    std::string run_id;      // all hosts use the one of node 0
    int64_t store_port = 0;
    std::chrono::milliseconds timeout{0};                                    // for the other hosts to join
    std::chrono::milliseconds heartbeat_timeout = std::chrono::seconds(15);  // then a launcher counts as dead
  };
  HostRendezvous(c10::intrusive_ptr<c10d::Store> store, Options options);
  ~HostRendezvous();  // node 0 serves the store, so it waits until the others have left

  // Announces this host for restart number `restarts` and waits for the other hosts.
  // Returns nullopt if a signal arrives meanwhile.
  // Throws UsageError if the hosts were started with different options. Throws CommError if a host does not join in
  // time, or if the job has ended.
  std::optional<HostAssignment> join(int64_t restarts, const Signals& signals);

  // Reports a failure of this host. Returns the first failure that any host reported.
  // If it is not restartable, later calls of join() on other hosts fail instead of waiting for this one.
  JobFailure report_failure(const JobFailure& failure);
  // Reports that all ranks of this host succeeded.
  void report_success();
  struct Status {
    std::optional<JobFailure> failure;  // of any host
    bool all_succeeded = false;
  };
  // Sends a heartbeat and reads the status of the job. Call it several times per heartbeat_timeout.
  Status heartbeat();

 private:
  std::optional<HostAssignment> wait_for_hosts(int64_t restarts, const Signals& signals);
  void check_heartbeats();
  JobFailure store_lost(const std::string& why) const;
  std::string key(const std::string& name) const;

  c10::intrusive_ptr<c10d::Store> store_;
  const Options options_;
  int64_t restarts_ = 0;
  struct Peer {
    std::string host;
    int64_t heartbeats = -1;
    std::chrono::steady_clock::time_point last_heartbeat;
  };
  std::vector<Peer> peers_;
};

}  // namespace tessera::launch
