#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/region/region_backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <random>

// Ranks are threads of one process. The region of a group is found in a table of the process, by an id that the first
// member puts into the store; nobody waits for anybody while connecting.
namespace tessera::comm::detail {
namespace {

using region::Layout;
using region::Region;

// Anonymous memory: zero to begin with, and only the pages that are used cost anything.
std::shared_ptr<Region> map_region(const Layout& layout) {
  const size_t bytes = layout.total();
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TESSERA_CHECK(base != MAP_FAILED, CommError, "cannot map ", bytes, " bytes for a group of ", layout.ranks, " ranks");
  return {new Region(static_cast<char*>(base), layout, /*shared=*/false), [base, bytes](Region* region) {
            delete region;
            munmap(base, bytes);
          }};
}

struct Meeting {
  std::shared_ptr<Region> region;  // held until all members have it, so that an early leaver takes nothing with it
  int members = 0;
};
std::mutex meetings_mutex;
std::map<std::string, Meeting> meetings;

std::string fresh_id() {
  static std::mutex mutex;
  static std::mt19937_64 random{std::random_device{}()};
  std::lock_guard lock(mutex);
  return c10::str(getpid(), ".", random());
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_threads(const ConnectOptions& options) {
  std::shared_ptr<Region> region;
  if (options.size > 1) {
    const std::string id = options.store->compareSet("region", "", fresh_id());  // the first one's stays
    TESSERA_CHECK(id.substr(0, id.find('.')) == std::to_string(getpid()), UsageError, "backend 'threads' on group '",
                  options.group, "', but rank ", options.ranks[0],
                  " or another is in another process; use gloo, or run the ranks as threads");
    std::lock_guard lock(meetings_mutex);
    Meeting& meeting = meetings[id];
    if (!meeting.region) meeting.region = map_region(Layout::of(options.size));
    region = meeting.region;
    if (++meeting.members == options.size) meetings.erase(id);
  }
  return c10::make_intrusive<region::RegionBackend>("threads", options.rank, options.size, std::move(region),
                                                    region::Names{options.group, options.ranks},
                                                    region::Exchange::Options{options.timeout, options.spare_cores});
}

}  // namespace tessera::comm::detail
