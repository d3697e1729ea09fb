#include "tessera/comm/choice.h"

#include "tessera/base/error.h"
#include "tessera/comm/backends.h"

#include <algorithm>

namespace tessera::comm {
namespace {

std::string machine_name(const Host& host) { return host.machine.substr(0, host.machine.find('/')); }

}  // namespace

bool needs_hosts(const std::string& asked, int64_t world_size) {
  return world_size > 1 && (asked == "auto" || asked == "shm");
}

Choice choose_backend(const std::string& asked, std::span<const int64_t> ranks, std::span<const Host> hosts) {
  const size_t n = ranks.size();
  if (!needs_hosts(asked, static_cast<int64_t>(n)))
    return asked == "auto" ? Choice{"threads", "a group of one rank needs no wire"} : Choice{asked, "asked for"};
  const auto one = [&](auto same) { return std::find_if_not(hosts.begin(), hosts.end(), same) - hosts.begin(); };
  const auto away = static_cast<size_t>(one([&](const Host& h) { return h.machine == hosts[0].machine; }));
  const auto without = static_cast<size_t>(one([&](const Host& h) { return h.shm == "ok"; }));
  const std::string apart =
      away == n ? ""
                : c10::str("rank ", ranks[0], " is on ", machine_name(hosts[0]), " and rank ", ranks[away], " on ",
                           machine_name(hosts[away]),
                           hosts[0].machine.substr(0, hosts[0].machine.find('/')) == machine_name(hosts[away])
                               ? ", in another container or as another user"
                               : "");
  const std::string no_shm =
      without == n ? "" : c10::str("rank ", ranks[without], " has no shared memory (", hosts[without].shm, ")");
  if (asked == "shm") {
    TESSERA_CHECK(away == n, UsageError, "backend 'shm' joins ranks of one machine, but ", apart,
                  "; use 'auto' or 'gloo'");
    TESSERA_CHECK(without == n, CommError, "backend 'shm': ", no_shm, "; use 'auto' or 'gloo'");
    return {"shm", "asked for"};
  }
  if (away < n) return {"gloo", apart};
  if (std::all_of(hosts.begin(), hosts.end(), [&](const Host& h) { return h.pid == hosts[0].pid; }))
    return {"threads", "all ranks are threads of one process"};
  if (without < n) return {"gloo", no_shm};
  return {"shm", c10::str("all ", n, " ranks are on ", machine_name(hosts[0]))};
}

}  // namespace tessera::comm
