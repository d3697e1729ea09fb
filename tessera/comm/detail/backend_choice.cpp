#include "tessera/comm/detail/backend_choice.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/region/region.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <ostream>

namespace tessera::comm {
namespace {

// The members of one group and their hosts.
struct Members {
  std::vector<int64_t> ranks;
  std::vector<Host> hosts;

  // The index of the first member whose host differs in `field` from that of member 0; -1: none differs.
  template <class Field>
  int64_t first_different(Field Host::*field) const {
    for (size_t i = 0; i < hosts.size(); i++)
      if (hosts[i].*field != hosts[0].*field) return static_cast<int64_t>(i);
    return -1;
  }
  std::string machine(size_t i) const { return hosts[i].machine.substr(0, hosts[i].machine.find('/')); }
};

// Why the members cannot share memory; empty if they can.
std::string why_no_shared_memory(const Members& m) {
  if (const int64_t i = m.first_different(&Host::machine); i >= 0) {
    const size_t other = static_cast<size_t>(i);
    return c10::str("rank ", m.ranks[0], " is on ", m.machine(0), " and rank ", m.ranks[other], " on ",
                    m.machine(other) == m.machine(0) ? "it in another container or as another user" : m.machine(other));
  }
  for (size_t i = 0; i < m.hosts.size(); i++)
    if (m.hosts[i].shm != "ok") return c10::str("rank ", m.ranks[i], " has no shared memory (", m.hosts[i].shm, ")");
  return "";
}

BackendChoice choose_for(const Members& m) {
  if (m.first_different(&Host::machine) < 0 && m.first_different(&Host::pid) < 0)
    return {"threads", "", c10::str("all ", m.ranks.size(), " ranks are threads of one process")};
  if (const std::string why = why_no_shared_memory(m); !why.empty()) return {"gloo", "", why};
  return {"shm", "", c10::str("all ", m.ranks.size(), " ranks are on ", m.machine(0))};
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const BackendChoice& choice) {
  out << choice.backend;
  if (!choice.device_backend.empty()) out << ", devices over " << choice.device_backend;
  return out << " (" << choice.why << ")";
}

bool needs_hosts(const std::string& requested, int64_t world_size) {
  return world_size > 1 && (requested == "auto" || requested == "shm" || requested == "gloo");
}

BackendChoice choose_backend(const std::string& requested, const std::vector<int64_t>& ranks,
                             const std::vector<Host>& hosts) {
  if (requested != "auto" && requested != "shm") return {requested, "", "requested"};
  if (ranks.size() == 1)
    return {requested == "auto" ? "threads" : requested, "", "a group of one rank needs no transport"};
  Members members{ranks, {}};
  for (int64_t r : ranks) members.hosts.push_back(hosts.at(static_cast<size_t>(r)));
  if (requested == "shm") {
    const std::string why = why_no_shared_memory(members);
    TESSERA_CHECK(why.empty(), UsageError, "backend 'shm' needs ranks that can share memory, but ", why,
                  "; use 'auto' or 'gloo'");
    return {"shm", "", "requested"};
  }
  BackendChoice choice = choose_for(members);
  if (devices_for_all(hosts)) choice.device_backend = "nccl";
  return choice;
}

c10::intrusive_ptr<c10d::Backend> connect(const BackendChoice& choice, const ConnectOptions& options) {
  return choice.device_backend.empty() ? connect_checked(choice.backend, options)
                                       : connect_both(choice.backend, choice.device_backend, options);
}

std::vector<AutoChoice> auto_choices() {
  const Host here = this_host();
  Host beside = here, far = here;
  beside.pid++;
  far.machine = "another";
  BackendChoice shm = choose_for({{0, 1}, {here, beside}});
  shm.why = shm.backend == "shm" ? c10::str("through /dev/shm; a group of 4 takes ",
                                            region::RegionLayout::of(4).total() >> 10, " KiB there")
                                 : here.shm;
  BackendChoice threads = choose_for({{0, 1}, {here, here}}), gloo = choose_for({{0, 1}, {here, far}});
  threads.why = "through process memory";
  gloo.why = "over TCP";
  const BackendChoice device =
      here.devices > 0
          ? BackendChoice{"nccl", "", c10::str(here.devices, " devices here; used if every rank has one")}
          : BackendChoice{"as above", "", "through host memory: this build has no nccl, or the machine has no device"};
  return {
      {"of one process", threads}, {"of one machine", shm}, {"of several machines", gloo}, {"CUDA tensors", device}};
}

}  // namespace tessera::comm
