#include "tessera/comm/detail/rendezvous.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/detail/warn_once.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/listen.h"
#include "tessera/comm/detail/local_rendezvous.h"
#include "tessera/comm/detail/store/authenticated_store.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <sstream>

namespace tessera::comm::detail {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// Rank 0 makes the secret of the job and gives it to processes of the same user only.
StorePtr open_local_store(const RendezvousOptions& options, const std::string& job) {
  if (options.rank != 0) {
    const auto ticket = receive_store_ticket(job, options.timeout);
    return join_store(kLoopback, ticket.port, ticket.secret, options.timeout);
  }
  const std::string secret = store::make_job_secret();
  int64_t port = 0;
  auto store = host_store(kLoopback, 0, secret, options.timeout, port);
  send_store_ticket(job, {port, secret}, options.size, options.timeout);
  return store;
}

// Rank 0 hosts the store. `one_machine`: all ranks are on this machine, so no other one needs to reach it.
StorePtr open_store_of_rank_0(const RendezvousOptions& options, const std::string& host, int64_t port,
                              bool one_machine) {
  const std::string at = one_machine ? kLoopback : host;
  std::string secret = setting("TESSERA_JOB_SECRET");
  if (secret.empty() && one_machine) return open_local_store(options, c10::str("port ", port));
  if (secret.empty()) {
    secret = kPublicSecret;
    if (options.rank == 0)
      warn_once("rendezvous/secret",
                c10::str("no TESSERA_JOB_SECRET: every process that reaches ", host, ":", port,
                         " can join this job. Set the same secret for all ranks:  export TESSERA_JOB_SECRET=$(openssl "
                         "rand -hex 32)"));
  }
  if (options.rank == 0) return host_store(at, port, secret, options.timeout, port);
  return join_store(at, port, secret, options.timeout);
}

// The store of torchrun's agent. TCPStore has no authentication.
StorePtr join_tcp_store(const std::string& host, int64_t port, std::chrono::milliseconds timeout) {
  wait_for_listener(host, port, timeout);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

StorePtr join_store_of_tessera_run(const RendezvousOptions& options, const Environment& environment) {
  TESSERA_CHECK(setting_is_set("TESSERA_JOB_SECRET"), UsageError,
                "this rank was started by `tessera run`, but TESSERA_JOB_SECRET is not set; pass on the environment "
                "of the rank to the program that calls init()");
  return join_store(environment.host, environment.port, setting("TESSERA_JOB_SECRET"), options.timeout);
}

void check_unique_rank(const StorePtr& store, const RendezvousOptions& options) {
  const auto mine = to_bytes(std::to_string(options.size));
  const auto first = store->compareSet("world_size", {}, mine);
  TESSERA_CHECK(first == mine, UsageError, "rank ", options.rank, " was started in a world of ", options.size,
                " ranks, but an earlier rank in a world of ", std::string(first.begin(), first.end()),
                "; start all ranks with the same WORLD_SIZE");
  TESSERA_CHECK(store->add(c10::str("rank_", options.rank), 1) == 1, UsageError, "two processes are rank ",
                options.rank, " of ", options.size,
                "; give each process its own RANK, or each job its own MASTER_PORT");
}

void check_port(int64_t port, const std::string& host) {
  TESSERA_CHECK(port > 0 && port < 65536, UsageError, "port ", port, " for rendezvous on ", host,
                "; ports are 1 to 65535");
}

Rendezvous from_environment(const RendezvousOptions& options, const Environment& environment) {
  // A store of the launcher outlives a world, and a restarted world uses it again. So each world gets its own prefix.
  // Every rank calls init() equally often. The counter is thread-local, because ranks may be threads.
  static thread_local int64_t worlds = 0;
  const std::string part = c10::str("/worker/attempt_", environment.restarts, "/world_", worlds++);
  const bool tessera_run = environment.launcher_hosts_store && setting_is_set("TESSERA_RUN");
  if (environment.job.empty()) check_port(environment.port, environment.host);
  Rendezvous found;
  if (tessera_run) {
    found.store = join_store_of_tessera_run(options, environment);
    found.absent_ranks = [store = found.store, restarts = environment.restarts] {
      return read_absent_ranks(*store, restarts);
    };
  } else if (environment.launcher_hosts_store) {
    found.store = join_tcp_store(environment.host, environment.port, options.timeout);
  } else if (!environment.job.empty()) {
    found.store = open_local_store(options, environment.job + part);
  } else {
    found.store = open_store_of_rank_0(options, environment.host, environment.port,
                                       environment.one_machine || is_loopback(environment.host));
  }
  found.store = c10::make_intrusive<c10d::PrefixStore>(part, found.store);
  check_unique_rank(found.store, options);
  return found;
}

// FileStore opens the file with mode 0644. The owner could put anything into it.
StorePtr from_file(const RendezvousOptions& options, const std::string& path) {
  TESSERA_CHECK(path.starts_with("/"), UsageError, "init_method '", options.method, "': write file:///absolute/path");
  auto store = c10::make_intrusive<c10d::FileStore>(path, static_cast<int>(options.size));
  store->add("opened", 1);  // creates the file
  struct stat found {};
  TESSERA_CHECK(lstat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid() &&
                    (found.st_mode & (S_IWGRP | S_IWOTH)) == 0,
                UsageError, "init_method '", options.method,
                "': other users can write the file, or it belongs to one; choose a file in a folder of your own");
  return store;
}

StorePtr from_address(const RendezvousOptions& options, const std::string& address) {
  const size_t colon = address.rfind(':');
  int64_t port = -1;
  if (colon != std::string::npos) std::from_chars(address.data() + colon + 1, address.data() + address.size(), port);
  TESSERA_CHECK(port > 0, UsageError, "init_method '", options.method, "': write tcp://host:port");
  const std::string host = address.substr(0, colon);
  check_port(port, host);
  return open_store_of_rank_0(options, host, port, is_loopback(host));
}

std::string absent_key(int64_t restarts) { return c10::str("/launcher/attempt_", restarts, "/absent_ranks"); }

}  // namespace

const char* const kPublicSecret = "no secret: any process may join";

StorePtr host_store(const std::string& host, int64_t port, const std::string& secret, std::chrono::milliseconds timeout,
                    int64_t& port_found) {
  auto server = std::make_shared<store::StoreServer>(store::SocketAddress{host, port}, secret);
  const auto address = server->address();
  port_found = address.port;
  return c10::make_intrusive<store::AuthenticatedStore>(
      store::AuthenticatedStoreOptions{address, secret, timeout, std::move(server)});
}

StorePtr join_store(const std::string& host, int64_t port, const std::string& secret,
                    std::chrono::milliseconds timeout) {
  return c10::make_intrusive<store::AuthenticatedStore>(
      store::AuthenticatedStoreOptions{{host, port}, secret, timeout, {}});
}

// One line per report: "rank text". A rank's last one counts.
void report_absent_rank(c10d::Store& store, int64_t restarts, int64_t rank, const std::string& why) {
  store.append(absent_key(restarts), to_bytes(c10::str(rank, " ", why, "\n")));
}

AbsentRanks read_absent_ranks(c10d::Store& store, int64_t restarts) {
  const std::string key = absent_key(restarts);
  if (!store.check({key})) return {};
  const auto value = store.get(key);
  std::istringstream lines(std::string(value.begin(), value.end()));
  AbsentRanks absent;
  int64_t rank = 0;
  for (std::string why; lines >> rank && lines.get() && std::getline(lines, why);) absent[rank] = why;
  std::erase_if(absent, [](const auto& entry) { return entry.second.empty(); });
  return absent;
}

Rendezvous open_store(const RendezvousOptions& options, const Environment& environment) {
  const std::string& method = options.method;
  const auto after = [&](const char* scheme) { return method.substr(std::string(scheme).size()); };
  if (method == "env://") {
    if (options.size == 1) return {c10::make_intrusive<c10d::HashStore>()};
    return from_environment(options, environment);
  }
  if (method.starts_with("file://")) return {from_file(options, after("file://"))};
  if (method.starts_with("tcp://")) return {from_address(options, after("tcp://"))};
  TESSERA_FAIL(UsageError, "init_method '", method, "' is not supported; use env://, file:///path or tcp://host:port");
}

}  // namespace tessera::comm::detail
