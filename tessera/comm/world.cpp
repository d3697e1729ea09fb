#include "tessera/comm/world.h"

#include "tessera/base/detail/python_process.h"
#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/backend_choice.h"
#include "tessera/comm/detail/rendezvous.h"
#include "tessera/comm/detail/watch/liveness_monitor.h"
#include "tessera/comm/detail/watch/monitored_backend.h"
#include "tessera/comm/detail/watch/thread_ranks.h"
#include "tessera/comm/detail/world_state.h"
#include "tessera/comm/environment.h"

#include <c10/core/AutogradState.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdio>
#include <set>

namespace tessera {
namespace {

thread_local std::shared_ptr<World::State> current;

// Options override the launcher. A world size that differs from the started one is an error: init() would never return.
void choose_rank(World::State& state, const InitOptions& options, const comm::Environment& launched) {
  const bool has_launcher = !launched.launcher.empty();
  state.size = options.world_size >= 0 ? options.world_size : launched.size;
  state.rank = options.rank >= 0 ? options.rank : launched.rank;
  TESSERA_CHECK(state.rank >= 0 && state.rank < state.size, UsageError, "rank ", state.rank, " in a world of ",
                state.size, " ranks");
  TESSERA_CHECK(!has_launcher || state.requested_backend == "fake" || state.size == launched.size, UsageError,
                "init() got world_size ", state.size, ", but ", launched.size, " ranks were started (",
                launched.launcher, "); omit world_size, or start ", state.size, " ranks");
}

comm::detail::Rendezvous open_store(const InitOptions& options, const World::State& state, comm::Environment launched) {
  if (options.store) return {options.store};
  if (state.requested_backend == "fake") return {c10::make_intrusive<c10d::HashStore>()};
  if (launched.host.empty() && launched.job.empty()) {  // rank and size are options
    launched.host = setting("MASTER_ADDR");
    launched.port = setting_int("MASTER_PORT");
  }
  return comm::detail::open_store({options.init_method, state.rank, state.size, state.timeout}, launched);
}

bool on_one_host(const World::State& state, const std::vector<int64_t>& ranks) {
  if (state.hosts.empty()) return false;
  return std::all_of(ranks.begin(), ranks.end(), [&](int64_t r) {
    const comm::Host& host = state.hosts[static_cast<size_t>(r)];
    return host.machine == state.hosts[static_cast<size_t>(ranks[0])].machine && host.shm == "ok";
  });
}

// Ranks that are processes are monitored. Threads of one process need no monitor, because they end together.
bool needs_liveness_monitor(const World::State& state) {
  const auto& hosts = state.hosts;
  const auto other_process = [&](const comm::Host& h) {
    return h.pid != hosts[0].pid || h.machine != hosts[0].machine;
  };
  return std::all_of(hosts.begin(), hosts.end(), [](const comm::Host& h) { return h.shm == "ok"; }) &&
         std::any_of(hosts.begin(), hosts.end(), other_process);
}

comm::Group connect_group(const World::State& state, const std::vector<int64_t>& ranks, const std::string& key,
                          const std::string& name) {
  const auto group_rank = std::find(ranks.begin(), ranks.end(), state.rank) - ranks.begin();
  comm::ConnectOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>(key, state.store);
  options.rank = static_cast<int>(group_rank);
  options.size = static_cast<int>(ranks.size());
  options.group = name;
  options.ranks = ranks;
  options.timeout = state.timeout;
  options.core_per_rank = state.core_per_rank;
  options.one_host = on_one_host(state, ranks);
  if (state.liveness) options.lost = [liveness = state.liveness, ranks] { return liveness->lost(ranks); };
  if (state.thread_ranks) options.lost = [threads = state.thread_ranks, ranks] { return threads->lost(ranks); };
  const comm::BackendChoice choice = comm::choose_backend(state.requested_backend, ranks, state.hosts);
  auto backend = [&] {
    try {
      return comm::connect(choice, options);
    } catch (const UsageError&) {
      throw;
    } catch (const std::exception& error) {
      const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
      const std::string lost = state.liveness ? state.liveness->wait_for_cause(ranks) : "";
      TESSERA_FAIL(CommError, "rank ", state.rank, " could not connect group '", name, "' (ranks ",
                   c10::Join(",", ranks), ") over ", choice.backend, ": ",
                   c10_error ? c10_error->what_without_backtrace() : error.what(), lost.empty() ? "" : "; ", lost);
    }
  }();
  auto* monitored = dynamic_cast<comm::watch::MonitoredBackend*>(backend.get());
  auto group = c10::make_intrusive<comm::Communicator>(name, ranks, group_rank, std::move(backend), options.store,
                                                       state.timeout);
  if (monitored && options.size > 1) {
    c10::weak_intrusive_ptr<comm::Communicator> weak(group);
    const auto on_lost = [weak](const std::string& why) {
      if (auto alive = weak.lock()) alive->abort(why);
    };
    monitored->find_lost_rank = options.lost;
    if (state.liveness) monitored->recorder = state.liveness->add(name, key, ranks, on_lost);
    if (state.thread_ranks) state.thread_ranks->add(state.rank, ranks, on_lost);
  }
  return group;
}

void check_group_ranks(const World::State& state, const std::vector<int64_t>& ranks) {
  TESSERA_CHECK(!state.destroyed, UsageError, "the world was destroyed; it cannot create groups");
  TESSERA_CHECK(!ranks.empty(), UsageError, "a group needs at least one rank");
  for (int64_t r : ranks)
    TESSERA_CHECK(r >= 0 && r < state.size, UsageError, "group of ranks ", c10::Join(",", ranks), ": rank ", r,
                  " is not in a world of ", state.size);
  TESSERA_CHECK(std::set<int64_t>(ranks.begin(), ranks.end()).size() == ranks.size(), UsageError, "group of ranks ",
                c10::Join(",", ranks), " contains a rank twice");
  TESSERA_CHECK(std::find(ranks.begin(), ranks.end(), state.rank) != ranks.end(), UsageError, "rank ", state.rank,
                " is not among the ranks ", c10::Join(",", ranks), "; only the members create a group");
}

}  // namespace

World::World(std::shared_ptr<State> state) : state_(std::move(state)) {}

namespace {
World::State& checked(const std::shared_ptr<World::State>& state) {
  TESSERA_CHECK(state, UsageError, "this World is empty: it was default-constructed; use init() or World::current()");
  return *state;
}
}  // namespace

int64_t World::rank() const { return checked(state_).rank; }
int64_t World::size() const { return checked(state_).size; }
const comm::Group& World::group() const { return checked(state_).group; }
const std::string& World::backend() const { return checked(state_).backend; }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return checked(state_).store; }
RandomState& World::random() const { return checked(state_).random; }

comm::Group World::new_group(const std::vector<int64_t>& ranks, const std::string& name) const {
  check_group_ranks(checked(state_), ranks);
  const std::string list = c10::str(c10::Join(",", ranks));
  const int64_t number = state_->groups_made[ranks]++;
  auto group = connect_group(*state_, ranks, c10::str("group/", list, "/", number),
                             name.empty() ? c10::str("group ", list) : name);
  state_->groups.push_back(group);
  return group;
}

comm::Group World::shared_group(const std::vector<int64_t>& ranks) const {
  comm::Group& group = checked(state_).shared_groups[ranks];
  if (!group) {
    check_group_ranks(*state_, ranks);
    const std::string list = c10::str(c10::Join(",", ranks));
    group = connect_group(*state_, ranks, c10::str("shared/", list), c10::str("ranks ", list));
    state_->groups.push_back(group);
  }
  return group;
}

void World::abort(const std::string& reason) const {
  const std::string me = c10::str("rank ", checked(state_).rank, " ");
  const std::string why = reason.starts_with(me) ? reason : c10::str(me, "called World::abort: ", reason);
  tessera::detail::note_culprit(state_->rank, why);
  if (state_->liveness) state_->liveness->report_failure(why);
  if (state_->thread_ranks) state_->thread_ranks->report_failure(state_->rank, why);
  for (const auto& group : state_->groups) group->abort(why);
}

// A rank is a thread: its world, policies and observers are thread-local and must hold in backward too. Autograd would
// run the backward of device tensors on another thread. With one device per rank a single thread is as fast.
static void keep_backward_on_this_thread() { c10::AutogradState::get_tls_state().set_multithreading_enabled(false); }

World World::current() {
  TESSERA_CHECK(tessera::current, UsageError,
                "this thread has no world; call tessera::init() first, or create a World::Scope in your own thread");
  return World(tessera::current);
}
bool World::has_current() { return tessera::current != nullptr; }

World::Scope::Scope(World world) : before_(std::exchange(tessera::current, std::move(world.state_))) {
  keep_backward_on_this_thread();
}
World::Scope::~Scope() { tessera::current = std::move(before_); }

World init(InitOptions options) {
  TESSERA_CHECK(
      !python_torch_loaded(), UsageError,
      "Python's torch is loaded in this process, and its autograd engine cannot be replaced; run Tessera in a "
      "separate process");
  TESSERA_CHECK(!World::has_current(), UsageError, "this thread already has a world of ", World::current().size(),
                " ranks; call destroy() before another init()");
  auto state = std::make_shared<World::State>();
  record_uncaught_errors();
  if (setting_is_set("TESSERA_RUN")) std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a pipe would buffer lines
  const bool from_env = options.init_method == "env://" && !options.store;
  const auto launched = from_env ? comm::read_environment() : comm::Environment();
  state->timeout = options.timeout.count() > 0
                       ? options.timeout
                       : std::chrono::milliseconds(static_cast<int64_t>(setting_number("TESSERA_TIMEOUT_S") * 1000));
  state->requested_backend = options.backend.empty() ? setting("TESSERA_BACKEND") : options.backend;
  comm::check_backend(state->requested_backend);
  choose_rank(*state, options, launched);
  const auto rendezvous = open_store(options, *state, launched);
  state->store = rendezvous.store;
  if (comm::needs_hosts(state->requested_backend, state->size))
    state->hosts =
        comm::exchange_hosts(*state->store, state->rank, state->size, state->timeout, rendezvous.absent_ranks);
  state->core_per_rank =
      state->hosts.empty() ? comm::has_core_per_rank(state->size) : comm::has_core_per_rank(state->hosts, state->rank);
  if (needs_liveness_monitor(*state)) {
    state->liveness = comm::watch::LivenessMonitor::start(state->store, state->hosts, state->rank, state->timeout);
    set_error_callback(comm::watch::LivenessMonitor::report_failure_of_process);
  } else if (state->size > 1) {
    state->thread_ranks = comm::watch::ThreadRanks::join(state->store, state->rank);
  }
  std::vector<int64_t> everyone(static_cast<size_t>(state->size));
  for (size_t r = 0; r < everyone.size(); r++) everyone[r] = static_cast<int64_t>(r);
  state->backend = comm::choose_backend(state->requested_backend, everyone, state->hosts).backend;
  state->group = connect_group(*state, everyone, "world", "world");
  state->groups.push_back(state->group);
  state->shared_groups[everyone] = state->group;
  current = state;
  keep_backward_on_this_thread();
  return World(state);
}

void destroy() {
  if (!current) return;
  auto state = std::exchange(current, nullptr);
  state->destroyed = true;
  if (auto meshes = std::exchange(state->meshes, nullptr)) meshes->clear();
  state->shared_groups.clear();
  if (state->liveness) state->liveness->stop();
  if (state->thread_ranks) state->thread_ranks->leave(state->rank);
  for (auto& group : state->groups) group->close();
  state->groups.clear();
  if (state->liveness) state->liveness->leave();
}

int64_t get_rank(const comm::Group& group) { return group ? group->rank() : World::current().rank(); }
int64_t get_world_size(const comm::Group& group) { return group ? group->size() : World::current().size(); }

}  // namespace tessera
