#include "tessera/launch/detail/host_rendezvous.h"

#include "tessera/base/error.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <poll.h>
#include <unistd.h>

#include <sstream>
#include <thread>

namespace tessera::launch {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kPollMs = 20;

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// What a host writes to the store, as "nproc_per_node nnodes max_restarts pid run_id host".
struct Announcement {
  int64_t nproc_per_node = 0, nnodes = 0, max_restarts = 0, pid = 0;
  std::string run_id, host;
};
std::string to_text(const Announcement& a) {
  return c10::str(a.nproc_per_node, " ", a.nnodes, " ", a.max_restarts, " ", a.pid, " ", a.run_id, " ", a.host);
}
Announcement parse_announcement(const std::string& text) {
  Announcement a;
  std::istringstream(text) >> a.nproc_per_node >> a.nnodes >> a.max_restarts >> a.pid >> a.run_id >> a.host;
  return a;
}

// A failure, as "exit_code restartable text".
std::string to_text(const JobFailure& f) { return c10::str(f.exit_code, " ", f.restartable, " ", f.text); }
JobFailure parse_failure(const std::string& text) {
  JobFailure f;
  std::istringstream in(text);
  in >> f.exit_code >> f.restartable;
  in.get();
  f.text.assign(std::istreambuf_iterator<char>(in), {});
  return f;
}

}  // namespace

HostRendezvous::HostRendezvous(c10::intrusive_ptr<c10d::Store> store, Options options)
    : store_(c10::make_intrusive<c10d::PrefixStore>("/launch", std::move(store))), options_(std::move(options)) {}

HostRendezvous::~HostRendezvous() {
  try {
    if (options_.node_rank != 0) {
      store_->add("left", 1);
      return;
    }
    const auto deadline = Clock::now() + std::chrono::seconds(3);  // a dead launcher never leaves
    while (store_->add("left", 0) < store_->add("joined", 0) - 1 && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs));
  } catch (const std::exception&) {  // the store is gone: there is nothing to wait for
  }
}

std::string HostRendezvous::key(const std::string& name) const { return c10::str("start_", restarts_, "/", name); }

std::optional<HostAssignment> HostRendezvous::join(int64_t restarts, const Signals& signals) {
  try {
    return wait_for_hosts(restarts, signals);
  } catch (const c10::DistError& error) {
    TESSERA_FAIL(CommError, store_lost(first_line(error.what())).text);
  }
}

std::optional<HostAssignment> HostRendezvous::wait_for_hosts(int64_t restarts, const Signals& signals) {
  restarts_ = restarts;
  const Announcement me{options_.nproc_per_node, options_.nnodes, options_.max_restarts, getpid(),
                        options_.run_id,         options_.host};
  const auto host_key = [&](int64_t node) { return key(c10::str("host_", node)); };
  const std::string found = text_of(store_->compareSet(host_key(options_.node_rank), {}, bytes(to_text(me))));
  TESSERA_CHECK(found == to_text(me), UsageError, "two launchers use --node-rank ", options_.node_rank, ": one on ",
                parse_announcement(found).host, ", one on ", options_.host, "; give each host a different node rank");
  if (restarts == 0) store_->add("joined", 1);

  HostAssignment assignment{options_.node_rank,  options_.nnodes,     0, options_.nproc_per_node, 0,
                            options_.store_host, options_.store_port, ""};
  peers_.assign(static_cast<size_t>(options_.nnodes), {});
  const auto deadline = Clock::now() + options_.timeout;
  for (int64_t node = 0; node < options_.nnodes; node++) {
    while (!store_->check({host_key(node)})) {
      TESSERA_CHECK(Clock::now() < deadline, CommError, "node ", node, " of ", options_.nnodes, " has not joined at ",
                    options_.store_host, ":", options_.store_port, " within ", options_.timeout.count() / 1000,
                    " s; start `tessera run --node-rank ", node, "` on that host");
      TESSERA_CHECK(!store_->check({"ended"}), CommError, "the job has ended: ", text_of(store_->get("ended")));
      store_->add(c10::str("heartbeats_", options_.node_rank), 1);
      signals.stop_if_requested();
      pollfd waiting{signals.stop_fd(), POLLIN, 0};
      if (poll(&waiting, 1, kPollMs) > 0) return std::nullopt;
    }
    const auto other = parse_announcement(text_of(store_->get(host_key(node))));
    const auto check_same = [&](const char* option, int64_t theirs, int64_t ours) {
      TESSERA_CHECK(theirs == ours, UsageError, "this host has ", option, " ", ours, ", node ", node, " (", other.host,
                    ") has ", option, " ", theirs, "; use the same value on all hosts");
    };
    check_same("--nnodes", other.nnodes, options_.nnodes);
    check_same("--max-restarts", other.max_restarts, options_.max_restarts);
    if (node == 0) assignment.run_id = other.run_id;
    if (node < options_.node_rank) assignment.first_rank += other.nproc_per_node;
    assignment.world_size += other.nproc_per_node;
    peers_[static_cast<size_t>(node)] = {other.host, -1, Clock::now()};
  }
  return assignment;
}

JobFailure HostRendezvous::store_lost(const std::string& why) const {
  return {1, false,
          c10::str("lost the connection to the store at ", options_.store_host, ":", options_.store_port,
                   ", which the launcher of node 0 serves (", why, ")")};
}

JobFailure HostRendezvous::report_failure(const JobFailure& failure) {
  try {
    if (!failure.restartable) store_->compareSet("ended", {}, bytes(failure.text));
    return parse_failure(text_of(store_->compareSet(key("failure"), {}, bytes(to_text(failure)))));
  } catch (const std::exception&) {
    return failure;  // the store is gone; report the local failure
  }
}

void HostRendezvous::report_success() {
  try {
    store_->add(key("succeeded"), 1);
  } catch (const std::exception&) {  // heartbeat() reports it
  }
}

HostRendezvous::Status HostRendezvous::heartbeat() {
  Status status;
  try {
    store_->add(c10::str("heartbeats_", options_.node_rank), 1);
    if (options_.node_rank == 0) check_heartbeats();
    if (store_->check({key("failure")})) status.failure = parse_failure(text_of(store_->get(key("failure"))));
    status.all_succeeded = store_->add(key("succeeded"), 0) == options_.nnodes;
  } catch (const std::exception& error) {
    status.failure = store_lost(first_line(error.what()));
  }
  return status;
}

// Only node 0 calls this. The others detect its death by losing the store.
void HostRendezvous::check_heartbeats() {
  const auto now = Clock::now();
  for (size_t node = 1; node < peers_.size(); node++) {
    Peer& peer = peers_[node];
    const int64_t heartbeats = store_->add(c10::str("heartbeats_", node), 0);
    if (heartbeats != peer.heartbeats) peer.last_heartbeat = now, peer.heartbeats = heartbeats;
    if (now - peer.last_heartbeat > options_.heartbeat_timeout)
      report_failure({1, false,
                      c10::str("the launcher of node ", node, " on ", peer.host, " has sent no heartbeat for ",
                               options_.heartbeat_timeout.count() / 1000, " s")});
  }
}

}  // namespace tessera::launch
