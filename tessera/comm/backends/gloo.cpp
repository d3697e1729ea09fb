// The only file that uses ProcessGroupGloo. LibTorch exports the class but does not ship gloo's headers. So this file
// is compiled with stub headers on its include path (detail/gloo_stub). ProcessGroupGloo uses gloo's types only behind
// shared_ptr, so empty definitions are enough.
#define USE_C10D_GLOO 1
#include "tessera/base/detail/settings.h"
#include "tessera/comm/backends.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace tessera::comm::detail {

c10::intrusive_ptr<c10d::Backend> connect_gloo(const ConnectOptions& options) {
  using c10d::ProcessGroupGloo;
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  std::string host = setting("TESSERA_GLOO_HOST");
  if (host.empty() && options.one_host) host = "127.0.0.1";  // no other machine needs to reach this one
  gloo->devices.push_back(host.empty() ? ProcessGroupGloo::createDefaultDevice()
                                       : ProcessGroupGloo::createDeviceForHostname(host));
  gloo->group_name = options.group;
  gloo->global_ranks_in_group.assign(options.ranks.begin(), options.ranks.end());
  return c10::make_intrusive<ProcessGroupGloo>(options.store, options.rank, options.size, gloo);
}

}  // namespace tessera::comm::detail
