#include "tessera/comm/detail/rendezvous.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/listen.h"
#include "tessera/comm/detail/meet.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>

namespace tessera::comm::detail {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

Store meet_by_job(const Meeting& meeting, const std::string& job) {
  const std::string here = "127.0.0.1";
  if (meeting.rank != 0) return tcp_store(here, ask_port(job, meeting.timeout), false, meeting.timeout);
  int64_t port = 0;
  auto store = keep_store(here, 0, meeting.timeout, port);
  tell_port(job, static_cast<uint16_t>(port), meeting.size, meeting.timeout);
  return store;
}

void check_in(const Store& store, const Meeting& meeting) {
  const auto mine = bytes(std::to_string(meeting.size));
  const auto first = store->compareSet("world_size", {}, mine);
  TESSERA_CHECK(first == mine, UsageError, "rank ", meeting.rank, " was told of a world of ", meeting.size,
                " ranks, but a rank before it of ", std::string(first.begin(), first.end()),
                "; start all ranks with the same WORLD_SIZE");
  TESSERA_CHECK(store->add(c10::str("rank_", meeting.rank), 1) == 1, UsageError, "two processes say they are rank ",
                meeting.rank, " of ", meeting.size, "; give each its own RANK, or another MASTER_PORT to another job");
}

Store from_environment(const Meeting& meeting, const Environment& environment) {
  // A launcher's store outlives a world, and a restarted world finds it again: each gets its own part. Every rank calls
  // init() equally often; ranks may be threads.
  static thread_local int64_t worlds = 0;
  const std::string part = c10::str("/worker/attempt_", environment.restarts, "/world_", worlds++);
  const bool server = meeting.rank == 0 && !environment.store_is_kept;
  // Where all ranks are here and keep the store themselves, nobody else need be able to reach it.
  const bool here = environment.local_size == environment.size && !environment.store_is_kept;
  const std::string host = here ? "127.0.0.1" : environment.host;
  auto store = environment.job.empty() ? tcp_store(host, environment.port, server, meeting.timeout)
                                       : meet_by_job(meeting, environment.job + part);
  store = c10::make_intrusive<c10d::PrefixStore>(part, store);
  check_in(store, meeting);
  return store;
}

Store from_file(const Meeting& meeting, const std::string& path) {
  TESSERA_CHECK(path.starts_with("/"), UsageError, "init_method '", meeting.method, "': write file:///absolute/path");
  return c10::make_intrusive<c10d::FileStore>(path, static_cast<int>(meeting.size));
}

Store from_address(const Meeting& meeting, const std::string& address) {
  const size_t colon = address.rfind(':');
  int64_t port = -1;
  if (colon != std::string::npos) std::from_chars(address.data() + colon + 1, address.data() + address.size(), port);
  TESSERA_CHECK(port > 0, UsageError, "init_method '", meeting.method, "': write tcp://host:port");
  return tcp_store(address.substr(0, colon), port, meeting.rank == 0, meeting.timeout);
}

}  // namespace

Store keep_store(const std::string& host, int64_t port, std::chrono::milliseconds timeout, int64_t& port_found) {
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
  if (server) return keep_store(host, port, timeout, port);
  wait_for_listener(host, port, timeout);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

Store open_store(const Meeting& meeting, const Environment& environment) {
  const std::string& method = meeting.method;
  const auto after = [&](const char* scheme) { return method.substr(std::string(scheme).size()); };
  if (method == "env://") {
    if (meeting.size == 1) return c10::make_intrusive<c10d::HashStore>();
    return from_environment(meeting, environment);
  }
  if (method.starts_with("file://")) return from_file(meeting, after("file://"));
  if (method.starts_with("tcp://")) return from_address(meeting, after("tcp://"));
  TESSERA_FAIL(UsageError, "init_method '", method, "' is none of env://, file:///path, tcp://host:port");
}

}  // namespace tessera::comm::detail
