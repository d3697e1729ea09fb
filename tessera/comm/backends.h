#pragma once
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

// The backends that can carry a group, and register_backend() to add one (PyTorch: dist.Backend.register_backend).
// Any c10d::Backend can be used.
//
// Example:
//   ts::comm::register_backend("mpi", [](const ts::comm::ConnectOptions& o) {
//     return c10::make_intrusive<MyMpiBackend>(o.store, o.rank, o.size);   // derives from c10d::Backend
//   });
//   ts::init({.backend = "mpi"});
namespace tessera::comm {

// What a backend gets to connect one group on one rank.
struct ConnectOptions {
  // Shared by the members of the group only, so keys need no prefix.
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;                         // this rank's place in the group
  int size = 1;                         // number of ranks in the group
  std::string group;                    // the name of the group, for error messages
  std::vector<int64_t> ranks;           // the global ranks of the members
  std::chrono::milliseconds timeout{};  // of each collective, and of connecting
  // Every rank of this machine has its own CPU core, so a rank may busy-wait for a moment.
  bool core_per_rank = false;
  bool one_host = false;  // all members are on this machine
  // Call it while connecting: returns which member is lost and why, or "". May be null.
  std::function<std::string()> lost = {};
};

// Connects one rank of a group. Runs on every member.
using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(const ConnectOptions&)>;

// One entry of the table of backends.
struct BackendInfo {
  std::string name;                 // "gloo": the value of InitOptions::backend and TESSERA_BACKEND
  std::string help;                 // one line, shown by `tessera env`
  std::function<bool()> available;  // whether it can be used in this build, on this machine
  Connect connect;                  // connects one group
};

// Adds a backend, or replaces the one with that name. Call it before ts::init(). `help` is shown by `tessera env`.
void register_backend(const std::string& name, Connect connect, const std::string& help = "registered by the program");

// All backends: the built-in ones first, then the registered ones.
std::vector<BackendInfo> backends();

// Throws UsageError with the list of names if `name` is neither a backend nor "auto".
void check_backend(const std::string& name);

// Connects one group over a backend. Throws UsageError if the backend is not available.
c10::intrusive_ptr<c10d::Backend> connect(const std::string& backend, const ConnectOptions& options);

// The same. For a backend that does not detect mismatched collectives itself (gloo), the result checks every collective
// before it is posted. The setting TESSERA_CHECK_COLLECTIVES controls this.
c10::intrusive_ptr<c10d::Backend> connect_checked(const std::string& backend, const ConnectOptions& options);

// Connects two backends as one: `host` for CPU tensors, `device` for all other tensors.
c10::intrusive_ptr<c10d::Backend> connect_both(const std::string& host, const std::string& device,
                                               const ConnectOptions& options);

namespace detail {
// The built-in backends, one file each in comm/backends/.
c10::intrusive_ptr<c10d::Backend> connect_threads(const ConnectOptions& options);
c10::intrusive_ptr<c10d::Backend> connect_shm(const ConnectOptions& options);
c10::intrusive_ptr<c10d::Backend> connect_gloo(const ConnectOptions& options);
c10::intrusive_ptr<c10d::Backend> connect_fake(const ConnectOptions& options);
c10::intrusive_ptr<c10d::Backend> connect_nccl(const ConnectOptions& options);
// Uses `host` for CPU tensors and `device` for all other tensors.
c10::intrusive_ptr<c10d::Backend> by_device(const ConnectOptions& options, c10::intrusive_ptr<c10d::Backend> host,
                                            c10::intrusive_ptr<c10d::Backend> device);
// The number of CUDA devices that this process sees; 0 in a build without nccl.
int64_t nccl_devices();
}  // namespace detail

}  // namespace tessera::comm
