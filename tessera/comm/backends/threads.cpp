#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/region/region_backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <random>

// The backend "threads": ranks are threads of one process. The first member puts an id into the store. The members find
// the region of the group by this id in a table of the process. Connecting does not wait for other members.
namespace tessera::comm::detail {
namespace {

using region::Region;
using region::RegionLayout;

// Anonymous memory: it starts zeroed, and only used pages take memory.
std::shared_ptr<Region> map_region(const RegionLayout& layout) {
  const size_t bytes = layout.total();
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TESSERA_CHECK(base != MAP_FAILED, CommError, "cannot map ", bytes, " bytes for a group of ", layout.ranks, " ranks");
  return {new Region(static_cast<char*>(base), layout, /*shared=*/false), [base, bytes](Region* region) {
            delete region;
            munmap(base, bytes);
          }};
}

struct PendingRegion {
  std::shared_ptr<Region> region;  // kept until all members have it, even if one leaves before
  int members = 0;
};
std::mutex pending_mutex;
std::map<std::string, PendingRegion> pending_regions;

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
    const std::string id = options.store->compareSet("region", "", fresh_id());  // the id of the first member wins
    TESSERA_CHECK(id.substr(0, id.find('.')) == std::to_string(getpid()), UsageError, "backend 'threads' on group '",
                  options.group, "', but rank ", options.ranks[0],
                  " or another member is in another process; use shm or gloo, or run the ranks as threads");
    std::lock_guard lock(pending_mutex);
    PendingRegion& pending = pending_regions[id];
    if (!pending.region) pending.region = map_region(RegionLayout::of(options.size));
    region = pending.region;
    if (++pending.members == options.size) pending_regions.erase(id);
  }
  return c10::make_intrusive<region::RegionBackend>("threads", options.rank, options.size, std::move(region),
                                                    region::GroupInfo{options.group, options.ranks},
                                                    region::Exchange::Options{options.timeout, options.core_per_rank});
}

}  // namespace tessera::comm::detail
