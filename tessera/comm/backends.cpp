#include "tessera/comm/backends.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/hosts.h"
#include "tessera/comm/detail/watch/checked_backend.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <mutex>

namespace tessera::comm {
namespace {

struct BackendTable {
  std::mutex mutex;
  std::vector<BackendInfo> backends = {
      {"threads", "ranks are threads of this process", [] { return true; }, detail::connect_threads},
      {"shm", "ranks are processes of one machine, over shared memory", [] { return this_host().shm == "ok"; },
       detail::connect_shm},
      {"gloo", "CPU tensors over TCP, one or many machines", [] { return true; }, detail::connect_gloo},
      {"fake", "a world of any size without peers, for planning", [] { return true; }, detail::connect_fake},
      {"nccl", "CUDA tensors; one device per rank", [] { return detail::nccl_devices() > 0; }, detail::connect_nccl},
  };
};
BackendTable& backend_table() {
  static BackendTable table;
  return table;
}

BackendInfo find_backend(const std::string& name) {
  BackendTable& t = backend_table();
  std::lock_guard lock(t.mutex);
  std::string known;
  for (const BackendInfo& backend : t.backends) {
    if (backend.name == name) return backend;
    known += (known.empty() ? "" : ", ") + backend.name;
  }
  TESSERA_FAIL(UsageError, "unknown backend '", name, "'; known are ", known,
               ". Add your own with comm::register_backend");
}

}  // namespace

void register_backend(const std::string& name, Connect connect, const std::string& help) {
  BackendTable& t = backend_table();
  std::lock_guard lock(t.mutex);
  std::erase_if(t.backends, [&](const BackendInfo& backend) { return backend.name == name; });
  t.backends.push_back({name, help, [] { return true; }, std::move(connect)});
}

std::vector<BackendInfo> backends() {
  BackendTable& t = backend_table();
  std::lock_guard lock(t.mutex);
  return t.backends;
}

void check_backend(const std::string& name) {
  if (name != "auto") find_backend(name);
}

c10::intrusive_ptr<c10d::Backend> connect(const std::string& backend, const ConnectOptions& options) {
  const BackendInfo info = find_backend(backend);
  TESSERA_CHECK(info.available(), UsageError, "backend '", backend, "' (", info.help,
                ") is not available in this build or on this machine");
  return info.connect(options);
}

c10::intrusive_ptr<c10d::Backend> connect_checked(const std::string& backend, const ConnectOptions& options) {
  if (backend != "gloo" || options.size == 1) return connect(backend, options);
  return watch::connect_checked_backend(options, [](const ConnectOptions& gloo) { return connect("gloo", gloo); });
}

c10::intrusive_ptr<c10d::Backend> connect_both(const std::string& host, const std::string& device,
                                               const ConnectOptions& options) {
  ConnectOptions device_options = options;
  device_options.store = c10::make_intrusive<c10d::PrefixStore>(device, options.store);
  return detail::by_device(options, connect_checked(host, options), connect(device, device_options));
}

}  // namespace tessera::comm
