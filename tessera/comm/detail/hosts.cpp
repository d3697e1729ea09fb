#include "tessera/comm/detail/hosts.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/watch/store_wait.h"

#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

namespace tessera::comm {
namespace {

std::string first_word(const char* path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

// The value of a field of /proc/self/status: "Cpus_allowed_list:  0-3".
std::string status_field(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) {
      std::string value;
      std::istringstream(line.substr(name.size() + 1)) >> value;
      return value;
    }
  return "";
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "?";
}

// "0-2,5" -> 0 1 2 5
std::set<int64_t> parse_cores(const std::string& text) {
  std::set<int64_t> cores;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    int64_t first = 0;
    const char* end = part.data() + part.size();
    const char* at = std::from_chars(part.data(), end, first).ptr;
    int64_t last = first;
    if (at != end && *at == '-') std::from_chars(at + 1, end, last);
    for (int64_t core = first; core <= last; core++) cores.insert(core);
  }
  return cores;
}

std::string key_of(int64_t rank) { return c10::str("host/", rank); }

}  // namespace

Host this_host() {
  struct stat shm {
  }, pids{};
  Host host;
  if (stat("/dev/shm", &shm) != 0)
    host.shm = c10::str("/dev/shm: ", std::strerror(errno));
  else if (access("/dev/shm", W_OK | X_OK) != 0)
    host.shm = c10::str("/dev/shm cannot be written: ", std::strerror(errno));
  stat("/proc/self/ns/pid", &pids);
  host.machine = c10::str(host_name(), "/", first_word("/proc/sys/kernel/random/boot_id").substr(0, 13), "/",
                          shm.st_dev, "/", pids.st_ino, "/", geteuid());
  host.pid = getpid();
  host.cores = status_field("Cpus_allowed_list");
  host.devices = detail::nccl_devices();
  host.visible = setting("CUDA_VISIBLE_DEVICES");
  return host;
}

std::string to_text(const Host& host) {
  return c10::str(host.machine, "\n", host.pid, "\n", host.cores, "\n", host.shm, "\n", host.devices, "\n",
                  host.visible);
}

Host parse_host(const std::string& text) {
  Host host;
  std::istringstream lines(text);
  std::string pid, devices;
  std::getline(lines, host.machine);
  std::getline(lines, pid);
  std::getline(lines, host.cores);
  std::getline(lines, host.shm);
  std::getline(lines, devices);
  std::getline(lines, host.visible);
  const auto number = [](const std::string& text, int64_t& value) {
    return std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc();
  };
  TESSERA_CHECK(number(pid, host.pid) && number(devices, host.devices), CommError, "the store holds '", text,
                "' where the host of a rank is expected");
  return host;
}

std::vector<Host> exchange_hosts(c10d::Store& store, int64_t rank, int64_t size, std::chrono::milliseconds timeout,
                                 const std::function<AbsentRanks()>& absent_ranks) {
  const auto bytes = [](const std::string& text) { return std::vector<uint8_t>(text.begin(), text.end()); };
  store.set(key_of(rank), bytes(to_text(this_host())));
  const auto fail = [&](int64_t culprit, const std::string& why) {
    tessera::detail::note_culprit(culprit, why);
    TESSERA_FAIL(CommError, "rank ", rank, " waits for all ", size, " ranks to join: ", why);
  };
  const auto absent = [&]() -> std::string {
    for (const auto& [r, why] : absent_ranks())
      if (r < size && !store.check({key_of(r)})) fail(r, why);
    return "";
  };
  std::vector<Host> hosts;
  for (int64_t r = 0; r < size; r++) {
    std::string text;
    try {
      text = watch::wait_for_key(store, key_of(r), timeout, absent_ranks ? absent : std::function<std::string()>());
    } catch (const UsageError&) {  // a store that refuses this process
      throw;
    } catch (const c10::Error& error) {
      if (tessera::detail::culprit_of(error.what_without_backtrace()) >= 0) throw;
      fail(r, c10::str("waited ", static_cast<double>(timeout.count()) / 1000.0, " s for rank ", r, " of ", size,
                       ". Was it started, with the same rendezvous address?"));
    }
    hosts.push_back(parse_host(text));
  }
  return hosts;
}

bool has_core_per_rank(int64_t ranks) {
  return ranks <= static_cast<int64_t>(parse_cores(status_field("Cpus_allowed_list")).size());
}

bool has_core_per_rank(const std::vector<Host>& hosts, int64_t rank) {
  const Host& me = hosts[static_cast<size_t>(rank)];
  std::set<int64_t> cores;
  size_t ranks = 0;
  for (const Host& host : hosts)
    if (host.machine == me.machine) {
      ranks++;
      cores.merge(parse_cores(host.cores));
    }
  return ranks <= cores.size();
}

// Ranks with different CUDA_VISIBLE_DEVICES have different devices. Ranks with the same value share its devices.
bool devices_for_all(const std::vector<Host>& hosts) {
  struct Devices {
    int64_t ranks = 0, devices = 0;
  };
  std::map<std::pair<std::string, std::string>, Devices> visible;  // by machine and CUDA_VISIBLE_DEVICES
  for (const Host& host : hosts) {
    Devices& d = visible[{host.machine, host.visible}];
    d.ranks++;
    d.devices = host.devices;
  }
  return !hosts.empty() &&
         std::all_of(visible.begin(), visible.end(), [](const auto& d) { return d.second.ranks <= d.second.devices; });
}

}  // namespace tessera::comm
