#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

// Which ranks share a machine, and the resources of each rank there. The ranks exchange this through the store.
namespace tessera::comm {

struct Host {
  // Equal for two ranks with the same kernel, pid namespace, /dev/shm and user. Such ranks can share memory.
  std::string machine;
  int64_t pid = 0;
  std::string cores;       // the cores that this rank may run on, as in /proc: "0-3,8"
  std::string shm = "ok";  // or why shared memory is not available
  int64_t devices = 0;     // CUDA devices that this rank sees; 0 in a build without nccl
  std::string visible;     // the value of CUDA_VISIBLE_DEVICES

  bool operator==(const Host&) const = default;
};
Host this_host();
std::string to_text(const Host& host);
Host parse_host(const std::string& text);

// By rank: why it cannot join the world any more, as its launcher knows: "rank 1 (pid 17) exited with code 0".
using AbsentRanks = std::map<int64_t, std::string>;

// Every rank calls it once. Returns the hosts of all ranks, in rank order.
// A rank that waits calls `absent_ranks` a few times per second. It throws CommError if one of these ranks has not
// joined. `absent_ranks` may be null.
std::vector<Host> exchange_hosts(c10d::Store& store, int64_t rank, int64_t size, std::chrono::milliseconds timeout,
                                 const std::function<AbsentRanks()>& absent_ranks = {});

// True if each rank on the machine of `rank` has its own core, so that a rank may busy-wait for a moment.
bool has_core_per_rank(const std::vector<Host>& hosts, int64_t rank);
bool has_core_per_rank(int64_t ranks);  // if all ranks are on this machine
// True if every rank can have its own CUDA device.
bool devices_for_all(const std::vector<Host>& hosts);

}  // namespace tessera::comm
