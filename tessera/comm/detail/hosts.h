#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

// Which ranks share a machine, and what each may use there. Told by every rank to all others through the store.
namespace tessera::comm {

struct Host {
  // Equal for two ranks that see the same kernel, processes and /dev/shm, as the same user: those can share memory.
  std::string machine;
  int64_t pid = 0;
  std::string cores;       // those this rank may run on, as in /proc: "0-3,8"
  std::string shm = "ok";  // or why shared memory cannot be had there
  int64_t devices = 0;     // CUDA devices it sees, where nccl is built in,
  std::string visible;     // of those named in CUDA_VISIBLE_DEVICES

  bool operator==(const Host&) const = default;
};
Host this_host();
std::string to_text(const Host& host);
Host parse_host(const std::string& text);

// Every rank calls it once. Gives the hosts of all ranks, in rank order.
std::vector<Host> meet_hosts(c10d::Store& store, int64_t rank, int64_t size, std::chrono::milliseconds timeout);

// True if the ranks that share a machine with `rank` have a core each, so that waiting may be active for a moment.
bool cores_to_spare(const std::vector<Host>& hosts, int64_t rank);
bool cores_to_spare(int64_t ranks);  // all of them here
// True if every rank can have a CUDA device of its own.
bool devices_for_all(const std::vector<Host>& hosts);

}  // namespace tessera::comm
