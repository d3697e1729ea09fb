#pragma once
#include "tessera/launch/detail/rank_plan.h"
#include "tessera/launch/detail/signals.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <optional>
#include <string>

// Launchers of several hosts, one each, that act as one: ranks are laid out by what each host announced, the first
// failure anywhere is everybody's, and nobody leaves before all are done. They talk through a store kept by node 0;
// ours is the part "/launch", the ranks' is another.
namespace tessera::launch {

struct JobFailure {
  int exit_code = 1;
  bool restartable = true;  // false: somebody asked us to stop, or we cannot go on
  std::string text;
};

class Hosts {
 public:
  struct Options {
    int64_t node = 0, nodes = 1, ranks = 1, max_restarts = 0;
    std::string host, store_host;  // our own name; where the store is, as all call it
    std::string run_id;            // node 0's is everybody's
    int64_t store_port = 0;
    std::chrono::milliseconds timeout{0};                          // for the others to come
    std::chrono::milliseconds silence = std::chrono::seconds(15);  // after which a launcher counts as dead
  };
  Hosts(c10::intrusive_ptr<c10d::Store> store, Options options);
  ~Hosts();  // node 0, which has the store, lets the others leave first

  // Announces this host for the `restarts`-th start of the ranks and waits for the others. Throws UsageError where they
  // disagree about the job, CommError if they do not come, or one
  // has left for good; stops early, with nothing, when a signal comes.
  std::optional<HostShare> join(int64_t restarts, const Signals& signals);

  // Gives the first that was reported, by whomever. Who will not start again says so: nobody need wait for him.
  JobFailure report(const JobFailure& failure);
  void finish();  // our ranks have ended well
  struct News {
    std::optional<JobFailure> failure;
    bool all_finished = false;
  };
  News news();  // to be asked now and then: it also tells the others that we are alive

 private:
  std::optional<HostShare> meet(int64_t restarts, const Signals& signals);
  void watch_the_others();
  JobFailure lost(const std::string& why) const;
  std::string key(const std::string& name) const;

  c10::intrusive_ptr<c10d::Store> store_;
  const Options options_;
  int64_t restarts_ = 0;
  struct Peer {
    std::string host;
    int64_t beats = -1;
    std::chrono::steady_clock::time_point heard;
  };
  std::vector<Peer> peers_;
};

}  // namespace tessera::launch
