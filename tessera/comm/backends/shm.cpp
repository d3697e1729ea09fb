#include "tessera/comm/backends.h"
#include "tessera/comm/detail/region/region_backend.h"
#include "tessera/comm/detail/region/shared_region.h"

// The backend "shm": ranks are processes of one machine.
namespace tessera::comm::detail {

c10::intrusive_ptr<c10d::Backend> connect_shm(const ConnectOptions& options) {
  std::shared_ptr<region::Region> region;
  if (options.size > 1) region = region::connect_shared_region(options, region::RegionLayout::of(options.size));
  return c10::make_intrusive<region::RegionBackend>("shm", options.rank, options.size, std::move(region),
                                                    region::GroupInfo{options.group, options.ranks},
                                                    region::Exchange::Options{options.timeout, options.core_per_rank});
}

}  // namespace tessera::comm::detail
