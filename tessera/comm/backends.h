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

// The one table of backends. A row says what it is called, whether it can be used here, and how a group is connected.
namespace tessera::comm {

struct ConnectOptions {
  c10::intrusive_ptr<c10d::Store> store;  // the members' own: keys need no prefix
  int rank = 0;                           // in the group
  int size = 1;
  std::string group;           // as shown to people
  std::vector<int64_t> ranks;  // the members' global ranks
  std::chrono::milliseconds timeout{};
  bool spare_cores = false;                // every rank of this machine has a core: waiting may be active for a moment
  bool one_host = false;                   // all members are on this machine
  std::function<std::string()> lost = {};  // which member is lost and why, while connecting; "": none
};
using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(const ConnectOptions&)>;

struct BackendRow {
  std::string name;
  std::string help;
  std::function<bool()> available;
  Connect connect;
};

// Adds a row, or replaces the one of that name: any c10d::Backend can carry a world.
// Example:  register_backend("mpi", [](const auto& o) { return c10::make_intrusive<MyMpi>(o.store, o.rank, o.size); });
void register_backend(const std::string& name, Connect connect, const std::string& help = "registered by the program");
std::vector<BackendRow> backends();

void check_backend(const std::string& name);  // throws UsageError that lists the names, if it is none and not "auto"
c10::intrusive_ptr<c10d::Backend> connect(const std::string& backend, const ConnectOptions& options);
// The same; what does not compare by itself what ranks post (gloo) stands behind a guard that does (comm/watch/).
c10::intrusive_ptr<c10d::Backend> connect_checked(const std::string& backend, const ConnectOptions& options);
// `host` for tensors on the host, `device` for all others.
c10::intrusive_ptr<c10d::Backend> connect_both(const std::string& host, const std::string& device,
                                               const ConnectOptions& options);

namespace detail {  // the rows' functions, one file each in comm/backends/
c10::intrusive_ptr<c10d::Backend> connect_threads(const ConnectOptions& options);
c10::intrusive_ptr<c10d::Backend> connect_shm(const ConnectOptions& options);
c10::intrusive_ptr<c10d::Backend> connect_gloo(const ConnectOptions& options);
c10::intrusive_ptr<c10d::Backend> connect_fake(const ConnectOptions& options);
c10::intrusive_ptr<c10d::Backend> connect_nccl(const ConnectOptions& options);
c10::intrusive_ptr<c10d::Backend> by_device(const ConnectOptions& options, c10::intrusive_ptr<c10d::Backend> host,
                                            c10::intrusive_ptr<c10d::Backend> device);
int64_t nccl_devices();  // CUDA devices this process sees; 0 in a build without nccl
}  // namespace detail

}  // namespace tessera::comm
