#include "tessera/comm/world.h"

#include "tessera/base/error.h"
#include "tessera/base/python_process.h"
#include "tessera/base/settings.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/choice.h"
#include "tessera/comm/detail/world_state.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <charconv>
#include <set>

namespace tessera {
namespace {

thread_local std::shared_ptr<World::State> current;

c10::intrusive_ptr<c10d::Store> tcp_store(const std::string& host, int64_t port, const World::State& state) {
  TESSERA_CHECK(port > 0 && port < 65536, UsageError, "port ", port, " for rendezvous on ", host);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  // torchrun may already keep a store at this address, in its agent.
  options.isServer = state.rank == 0 && setting("TORCHELASTIC_USE_AGENT_STORE") != "True";
  options.numWorkers = static_cast<size_t>(state.size);
  options.waitWorkers = false;
  options.timeout = state.timeout;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

c10::intrusive_ptr<c10d::Store> open_store(const InitOptions& options, const World::State& state) {
  if (options.store) return options.store;
  const std::string& method = options.init_method;
  const auto after = [&](const char* scheme) { return method.substr(std::string(scheme).size()); };
  if (method == "env://") {
    if (state.size == 1 || state.asked == "fake") return c10::make_intrusive<c10d::HashStore>();
    return tcp_store(setting("MASTER_ADDR"), setting_int("MASTER_PORT"), state);
  }
  if (method.starts_with("file://")) {
    TESSERA_CHECK(after("file://").starts_with("/"), UsageError, "init_method '", method,
                  "': write file:///absolute/path");
    return c10::make_intrusive<c10d::FileStore>(after("file://"), static_cast<int>(state.size));
  }
  if (method.starts_with("tcp://")) {
    const std::string address = after("tcp://");
    const size_t colon = address.rfind(':');
    int64_t port = -1;
    if (colon != std::string::npos) std::from_chars(address.data() + colon + 1, address.data() + address.size(), port);
    TESSERA_CHECK(port > 0, UsageError, "init_method '", method, "': write tcp://host:port");
    return tcp_store(address.substr(0, colon), port, state);
  }
  TESSERA_FAIL(UsageError, "init_method '", method, "' is none of env://, file:///path, tcp://host:port");
}

comm::Group connect_group(const World::State& state, const std::vector<int64_t>& ranks, const std::string& key,
                          const std::string& name) {
  const auto place = std::find(ranks.begin(), ranks.end(), state.rank) - ranks.begin();
  comm::ConnectOptions options;
  options.store = c10::make_intrusive<c10d::PrefixStore>(key, state.store);
  options.rank = static_cast<int>(place);
  options.size = static_cast<int>(ranks.size());
  options.group = name;
  options.ranks = ranks;
  options.timeout = state.timeout;
  options.spare_cores = state.spare_cores;
  const comm::Choice choice = comm::choose_backend(state.asked, ranks, state.hosts);
  auto backend = [&] {
    try {
      return comm::connect(choice, options);
    } catch (const UsageError&) {
      throw;
    } catch (const c10::Error& error) {
      TESSERA_FAIL(CommError, "rank ", state.rank, " could not connect group '", name, "' (ranks ",
                   c10::Join(",", ranks), ") over ", choice.backend, ": ", error.what_without_backtrace());
    } catch (const std::exception& error) {
      TESSERA_FAIL(CommError, "rank ", state.rank, " could not connect group '", name, "' (ranks ",
                   c10::Join(",", ranks), ") over ", choice.backend, ": ", error.what());
    }
  }();
  return c10::make_intrusive<comm::Communicator>(name, ranks, place, std::move(backend), options.store, state.timeout);
}

void check_members(const World::State& state, const std::vector<int64_t>& ranks) {
  TESSERA_CHECK(!state.destroyed, UsageError, "the world was destroyed; no group can be made in it");
  TESSERA_CHECK(!ranks.empty(), UsageError, "a group needs at least one rank");
  for (int64_t r : ranks)
    TESSERA_CHECK(r >= 0 && r < state.size, UsageError, "group of ranks ", c10::Join(",", ranks), ": rank ", r,
                  " is not in a world of ", state.size);
  TESSERA_CHECK(std::set<int64_t>(ranks.begin(), ranks.end()).size() == ranks.size(), UsageError, "group of ranks ",
                c10::Join(",", ranks), " names one twice");
  TESSERA_CHECK(std::find(ranks.begin(), ranks.end(), state.rank) != ranks.end(), UsageError, "rank ", state.rank,
                " is not among the ranks ", c10::Join(",", ranks), "; only the members make a group");
}

}  // namespace

World::World(std::shared_ptr<State> state) : state_(std::move(state)) {}

int64_t World::rank() const { return state_->rank; }
int64_t World::size() const { return state_->size; }
const comm::Group& World::group() const { return state_->group; }
const std::string& World::backend() const { return state_->backend; }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return state_->store; }
RandomState& World::random() const { return state_->random; }

comm::Group World::new_group(const std::vector<int64_t>& ranks, const std::string& name) const {
  check_members(*state_, ranks);
  const std::string list = c10::str(c10::Join(",", ranks));
  const int64_t number = state_->groups_made[ranks]++;
  auto group = connect_group(*state_, ranks, c10::str("group/", list, "/", number),
                             name.empty() ? c10::str("group ", list) : name);
  state_->groups.push_back(group);
  return group;
}

comm::Group World::shared_group(const std::vector<int64_t>& ranks) const {
  comm::Group& group = state_->shared_groups[ranks];
  if (!group) {
    check_members(*state_, ranks);
    const std::string list = c10::str(c10::Join(",", ranks));
    group = connect_group(*state_, ranks, c10::str("shared/", list), c10::str("ranks ", list));
    state_->groups.push_back(group);
  }
  return group;
}

void World::abort(const std::string& reason) const {
  for (const auto& group : state_->groups) group->abort(reason);
}

World World::current() {
  TESSERA_CHECK(tessera::current, UsageError,
                "no world on this thread; call tessera::init() first, or World::Scope in a thread of your own");
  return World(tessera::current);
}
bool World::has_current() { return tessera::current != nullptr; }

World::Scope::Scope(World world) : before_(std::exchange(tessera::current, std::move(world.state_))) {}
World::Scope::~Scope() { tessera::current = std::move(before_); }

World init(InitOptions options) {
  TESSERA_CHECK(
      !python_torch_loaded(), UsageError,
      "Python's torch is loaded in this process, and its autograd engine cannot be replaced; run Tessera in a "
      "process of its own");
  TESSERA_CHECK(!World::has_current(), UsageError, "this thread already has a world of ", World::current().size(),
                " ranks; call destroy() before another init()");
  auto state = std::make_shared<World::State>();
  const bool from_env = options.init_method == "env://" && !options.store;
  const auto given = [&](int64_t value, const char* variable, int64_t fallback) {
    if (value >= 0) return value;
    return from_env && setting_is_set(variable) ? setting_int(variable) : fallback;
  };
  state->size = given(options.world_size, "WORLD_SIZE", 1);
  state->rank = given(options.rank, "RANK", 0);
  TESSERA_CHECK(state->rank >= 0 && state->rank < state->size, UsageError, "rank ", state->rank, " in a world of ",
                state->size, " ranks");
  state->timeout = options.timeout.count() > 0
                       ? options.timeout
                       : std::chrono::milliseconds(static_cast<int64_t>(setting_number("TESSERA_TIMEOUT_S") * 1000));
  state->asked = options.backend.empty() ? setting("TESSERA_BACKEND") : options.backend;
  comm::check_backend(state->asked);
  state->store = open_store(options, *state);
  if (comm::needs_hosts(state->asked, state->size))
    state->hosts = comm::meet_hosts(*state->store, state->rank, state->size, state->timeout);
  state->spare_cores =
      state->hosts.empty() ? comm::cores_to_spare(state->size) : comm::cores_to_spare(state->hosts, state->rank);
  std::vector<int64_t> everyone(static_cast<size_t>(state->size));
  for (size_t r = 0; r < everyone.size(); r++) everyone[r] = static_cast<int64_t>(r);
  state->backend = comm::choose_backend(state->asked, everyone, state->hosts).backend;
  state->group = connect_group(*state, everyone, "world", "world");
  state->groups.push_back(state->group);
  state->shared_groups[everyone] = state->group;
  current = state;
  return World(state);
}

void destroy() {
  if (!current) return;
  auto state = std::exchange(current, nullptr);
  state->destroyed = true;
  if (auto meshes = std::exchange(state->meshes, nullptr)) meshes->clear();
  state->shared_groups.clear();
  for (auto& group : state->groups) group->close();
  state->groups.clear();
}

int64_t get_rank(const comm::Group& group) { return group ? group->rank() : World::current().rank(); }
int64_t get_world_size(const comm::Group& group) { return group ? group->size() : World::current().size(); }

}  // namespace tessera
