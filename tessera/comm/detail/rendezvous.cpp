#include "tessera/comm/detail/rendezvous.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/listen.h"
#include "tessera/comm/detail/port_exchange.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>

namespace tessera::comm::detail {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

Store store_by_job_name(const RendezvousOptions& options, const std::string& job) {
  const std::string here = "127.0.0.1";
  if (options.rank != 0) return tcp_store(here, receive_port(job, options.timeout), false, options.timeout);
  int64_t port = 0;
  auto store = host_tcp_store(here, 0, options.timeout, port);
  publish_port(job, static_cast<uint16_t>(port), options.size, options.timeout);
  return store;
}

void check_unique_rank(const Store& store, const RendezvousOptions& options) {
  const auto mine = to_bytes(std::to_string(options.size));
  const auto first = store->compareSet("world_size", {}, mine);
  TESSERA_CHECK(first == mine, UsageError, "rank ", options.rank, " was started in a world of ", options.size,
                " ranks, but an earlier rank in a world of ", std::string(first.begin(), first.end()),
                "; start all ranks with the same WORLD_SIZE");
  TESSERA_CHECK(store->add(c10::str("rank_", options.rank), 1) == 1, UsageError, "two processes are rank ",
                options.rank, " of ", options.size,
                "; give each process its own RANK, or each job its own MASTER_PORT");
}

Store from_environment(const RendezvousOptions& options, const Environment& environment) {
  // A store of the launcher outlives a world, and a restarted world uses it again. So each world gets its own prefix.
  // Every rank calls init() equally often. The counter is thread-local, because ranks may be threads.
  static thread_local int64_t worlds = 0;
  const std::string part = c10::str("/worker/attempt_", environment.restarts, "/world_", worlds++);
  const bool server = options.rank == 0 && !environment.launcher_hosts_store;
  // If all ranks are on this machine and rank 0 hosts the store, no other machine needs to reach it.
  const bool local = environment.local_size == environment.size && !environment.launcher_hosts_store;
  const std::string host = local ? "127.0.0.1" : environment.host;
  auto store = environment.job.empty() ? tcp_store(host, environment.port, server, options.timeout)
                                       : store_by_job_name(options, environment.job + part);
  store = c10::make_intrusive<c10d::PrefixStore>(part, store);
  check_unique_rank(store, options);
  return store;
}

Store from_file(const RendezvousOptions& options, const std::string& path) {
  TESSERA_CHECK(path.starts_with("/"), UsageError, "init_method '", options.method, "': write file:///absolute/path");
  return c10::make_intrusive<c10d::FileStore>(path, static_cast<int>(options.size));
}

Store from_address(const RendezvousOptions& options, const std::string& address) {
  const size_t colon = address.rfind(':');
  int64_t port = -1;
  if (colon != std::string::npos) std::from_chars(address.data() + colon + 1, address.data() + address.size(), port);
  TESSERA_CHECK(port > 0, UsageError, "init_method '", options.method, "': write tcp://host:port");
  return tcp_store(address.substr(0, colon), port, options.rank == 0, options.timeout);
}

}  // namespace

Store host_tcp_store(const std::string& host, int64_t port, std::chrono::milliseconds timeout, int64_t& port_found) {
  const Listener listener = listen_at(host, port);
  port_found = listener.port;
  c10d::TCPStoreOptions options;
  options.port = listener.port;
  options.isServer = true;
  options.masterListenFd = listener.fd;
  options.waitWorkers = false;
  options.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

Store tcp_store(const std::string& host, int64_t port, bool server, std::chrono::milliseconds timeout) {
  TESSERA_CHECK(port > 0 && port < 65536, UsageError, "port ", port, " for rendezvous on ", host);
  if (server) return host_tcp_store(host, port, timeout, port);
  wait_for_listener(host, port, timeout);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

Store open_store(const RendezvousOptions& options, const Environment& environment) {
  const std::string& method = options.method;
  const auto after = [&](const char* scheme) { return method.substr(std::string(scheme).size()); };
  if (method == "env://") {
    if (options.size == 1) return c10::make_intrusive<c10d::HashStore>();
    return from_environment(options, environment);
  }
  if (method.starts_with("file://")) return from_file(options, after("file://"));
  if (method.starts_with("tcp://")) return from_address(options, after("tcp://"));
  TESSERA_FAIL(UsageError, "init_method '", method, "' is not supported; use env://, file:///path or tcp://host:port");
}

}  // namespace tessera::comm::detail
