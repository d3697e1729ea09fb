// The only file that uses ProcessGroupGloo. LibTorch exports the class but does not ship gloo's headers. So this file
// is compiled with stub headers on its include path (detail/gloo_stub). ProcessGroupGloo uses gloo's types only behind
// shared_ptr, so empty definitions are enough.
#define USE_C10D_GLOO 1
#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/comm/backends.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace tessera::comm::detail {
namespace {

using GlooOptions = c10::intrusive_ptr<c10d::ProcessGroupGloo::Options>;

c10::intrusive_ptr<c10d::Backend> construct(const ConnectOptions& options, const GlooOptions& gloo) {
  return c10::make_intrusive<c10d::ProcessGroupGloo>(options.store, options.rank, options.size, gloo);
}

// Gloo's connect waits for every member until the time-out, and cannot be interrupted. So it runs on a thread of its
// own. If a member is lost meanwhile, that thread is left behind: it ends with the time-out or with the process.
c10::intrusive_ptr<c10d::Backend> construct_unless_lost(const ConnectOptions& options, const GlooOptions& gloo) {
  struct Connecting {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    c10::intrusive_ptr<c10d::Backend> backend;
    std::exception_ptr error;
  };
  const auto connecting = std::make_shared<Connecting>();
  std::thread([connecting, options, gloo] {
    c10::intrusive_ptr<c10d::Backend> backend;
    std::exception_ptr error;
    try {
      backend = construct(options, gloo);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(connecting->mutex);
    connecting->backend = std::move(backend);
    connecting->error = error;
    connecting->done = true;
    connecting->changed.notify_one();
  }).detach();
  std::unique_lock lock(connecting->mutex);
  while (!connecting->changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return connecting->done; }))
    if (const std::string why = options.lost(); !why.empty()) TESSERA_FAIL(CommError, why);
  if (connecting->error) std::rethrow_exception(connecting->error);
  return std::move(connecting->backend);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_gloo(const ConnectOptions& options) {
  using c10d::ProcessGroupGloo;
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  std::string host = setting("TESSERA_GLOO_HOST");
  if (host.empty() && options.one_host) host = "127.0.0.1";  // no other machine needs to reach this one
  gloo->devices.push_back(host.empty() ? ProcessGroupGloo::createDefaultDevice()
                                       : ProcessGroupGloo::createDeviceForHostname(host));
  gloo->group_name = options.group;
  gloo->global_ranks_in_group.assign(options.ranks.begin(), options.ranks.end());
  return options.lost ? construct_unless_lost(options, gloo) : construct(options, gloo);
}

}  // namespace tessera::comm::detail
