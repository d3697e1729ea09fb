#include "tessera/comm/backends.h"
#include "tessera/comm/detail/region/region_backend.h"
#include "tessera/comm/detail/region/shared_region.h"

// Ranks are processes of one machine.
namespace tessera::comm::detail {

c10::intrusive_ptr<c10d::Backend> connect_shm(const ConnectOptions& options) {
  std::shared_ptr<region::Region> region;
  if (options.size > 1) region = region::meet_in_shared_memory(options, region::Layout::of(options.size));
  return c10::make_intrusive<region::RegionBackend>("shm", options.rank, options.size, std::move(region),
                                                    region::Names{options.group, options.ranks},
                                                    region::Exchange::Options{options.timeout, options.spare_cores});
}

}  // namespace tessera::comm::detail
