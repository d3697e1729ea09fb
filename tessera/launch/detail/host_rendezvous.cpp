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
constexpr int kAskAgainMs = 20;

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// What a host says of itself, as "ranks nodes max_restarts pid run_id host".
struct Announcement {
  int64_t ranks = 0, nodes = 0, max_restarts = 0, pid = 0;
  std::string run_id, host;
};
std::string to_text(const Announcement& a) {
  return c10::str(a.ranks, " ", a.nodes, " ", a.max_restarts, " ", a.pid, " ", a.run_id, " ", a.host);
}
Announcement parse_announcement(const std::string& text) {
  Announcement a;
  std::istringstream(text) >> a.ranks >> a.nodes >> a.max_restarts >> a.pid >> a.run_id >> a.host;
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

Hosts::Hosts(c10::intrusive_ptr<c10d::Store> store, Options options)
    : store_(c10::make_intrusive<c10d::PrefixStore>("/launch", std::move(store))), options_(std::move(options)) {}

Hosts::~Hosts() {
  try {
    if (options_.node != 0) {
      store_->add("left", 1);
      return;
    }
    const auto deadline = Clock::now() + std::chrono::seconds(3);  // who is dead will not come
    while (store_->add("left", 0) < store_->add("came", 0) - 1 && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(kAskAgainMs));
  } catch (const std::exception&) {  // the others, or the store, are gone: nobody to wait for
  }
}

std::string Hosts::key(const std::string& name) const { return c10::str("start_", restarts_, "/", name); }

std::optional<HostShare> Hosts::join(int64_t restarts, const Signals& signals) {
  try {
    return meet(restarts, signals);
  } catch (const c10::DistError& error) {
    TESSERA_FAIL(CommError, lost(first_line(error.what())).text);
  }
}

std::optional<HostShare> Hosts::meet(int64_t restarts, const Signals& signals) {
  restarts_ = restarts;
  const Announcement me{options_.ranks, options_.nodes,  options_.max_restarts,
                        getpid(),       options_.run_id, options_.host};
  const auto host_key = [&](int64_t node) { return key(c10::str("host_", node)); };
  const std::string there = text_of(store_->compareSet(host_key(options_.node), {}, bytes(to_text(me))));
  TESSERA_CHECK(there == to_text(me), UsageError, "two launchers say --node-rank ", options_.node, ": one on ",
                parse_announcement(there).host, ", one on ", options_.host, "; give each host its own");
  if (restarts == 0) store_->add("came", 1);

  HostShare share{options_.node, options_.nodes, 0, options_.ranks, 0, options_.store_host, options_.store_port, ""};
  peers_.assign(static_cast<size_t>(options_.nodes), {});
  const auto deadline = Clock::now() + options_.timeout;
  for (int64_t node = 0; node < options_.nodes; node++) {
    while (!store_->check({host_key(node)})) {
      TESSERA_CHECK(Clock::now() < deadline, CommError, "node ", node, " of ", options_.nodes, " has not come to ",
                    options_.store_host, ":", options_.store_port, " within ", options_.timeout.count() / 1000,
                    " s; start `tessera run --node-rank ", node, "` there");
      TESSERA_CHECK(!store_->check({"over"}), CommError, "the job is over: ", text_of(store_->get("over")));
      store_->add(c10::str("beats_", options_.node), 1);
      pollfd waiting{signals.stop_fd(), POLLIN, 0};
      if (poll(&waiting, 1, kAskAgainMs) > 0) return std::nullopt;
    }
    const auto other = parse_announcement(text_of(store_->get(host_key(node))));
    TESSERA_CHECK(other.nodes == options_.nodes, UsageError, "this host was told --nnodes ", options_.nodes, ", node ",
                  node, " (", other.host, ") --nnodes ", other.nodes, "; write the same on all");
    TESSERA_CHECK(other.max_restarts == options_.max_restarts, UsageError, "this host was told --max-restarts ",
                  options_.max_restarts, ", node ", node, " (", other.host, ") --max-restarts ", other.max_restarts,
                  "; write the same on all");
    if (node == 0) share.run_id = other.run_id;
    if (node < options_.node) share.first_rank += other.ranks;
    share.world_size += other.ranks;
    peers_[static_cast<size_t>(node)] = {other.host, -1, Clock::now()};
  }
  return share;
}

JobFailure Hosts::lost(const std::string& why) const {
  return {1, false,
          c10::str("the launcher of node 0, which keeps the store at ", options_.store_host, ":", options_.store_port,
                   ", is gone (", why, ")")};
}

JobFailure Hosts::report(const JobFailure& failure) {
  try {
    if (!failure.restartable) store_->compareSet("over", {}, bytes(failure.text));
    return parse_failure(text_of(store_->compareSet(key("failure"), {}, bytes(to_text(failure)))));
  } catch (const std::exception&) {
    return failure;  // nobody to tell; what happened here is known
  }
}

void Hosts::finish() {
  try {
    store_->add(key("finished"), 1);
  } catch (const std::exception&) {  // news() will say so
  }
}

Hosts::News Hosts::news() {
  News news;
  try {
    store_->add(c10::str("beats_", options_.node), 1);
    if (options_.node == 0) watch_the_others();
    if (store_->check({key("failure")})) news.failure = parse_failure(text_of(store_->get(key("failure"))));
    news.all_finished = store_->add(key("finished"), 0) == options_.nodes;
  } catch (const std::exception& error) {
    news.failure = lost(first_line(error.what()));
  }
  return news;
}

// Node 0 alone does: the others would notice its death by the store's.
void Hosts::watch_the_others() {
  const auto now = Clock::now();
  for (size_t node = 1; node < peers_.size(); node++) {
    Peer& peer = peers_[node];
    const int64_t beats = store_->add(c10::str("beats_", node), 0);
    if (beats != peer.beats) peer.heard = now, peer.beats = beats;
    if (now - peer.heard > options_.silence)
      report({1, false,
              c10::str("the launcher of node ", node, " on ", peer.host, " has not been heard of for ",
                       options_.silence.count() / 1000, " s")});
  }
}

}  // namespace tessera::launch
