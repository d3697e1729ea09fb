#include "tessera/comm/backends.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/hosts.h"
#include "tessera/comm/detail/watch/checked_backend.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <mutex>

namespace tessera::comm {
namespace {

struct Table {
  std::mutex mutex;
  std::vector<BackendRow> rows = {
      {"threads", "ranks are threads of this process", [] { return true; }, detail::connect_threads},
      {"shm", "ranks are processes of one machine, over shared memory", [] { return this_host().shm == "ok"; },
       detail::connect_shm},
      {"gloo", "CPU tensors over TCP, one or many machines", [] { return true; }, detail::connect_gloo},
      {"fake", "a world of any size without peers, for planning", [] { return true; }, detail::connect_fake},
      {"nccl", "CUDA tensors; one device a rank", [] { return detail::nccl_devices() > 0; }, detail::connect_nccl},
  };
};
Table& table() {
  static Table it;
  return it;
}

BackendRow find(const std::string& name) {
  Table& t = table();
  std::lock_guard lock(t.mutex);
  std::string known;
  for (const BackendRow& row : t.rows) {
    if (row.name == name) return row;
    known += (known.empty() ? "" : ", ") + row.name;
  }
  TESSERA_FAIL(UsageError, "there is no backend '", name, "'; known are ", known,
               ". Add your own with comm::register_backend");
}

}  // namespace

void register_backend(const std::string& name, Connect connect, const std::string& help) {
  Table& t = table();
  std::lock_guard lock(t.mutex);
  std::erase_if(t.rows, [&](const BackendRow& row) { return row.name == name; });
  t.rows.push_back({name, help, [] { return true; }, std::move(connect)});
}

std::vector<BackendRow> backends() {
  Table& t = table();
  std::lock_guard lock(t.mutex);
  return t.rows;
}

void check_backend(const std::string& name) {
  if (name != "auto") find(name);
}

c10::intrusive_ptr<c10d::Backend> connect(const std::string& backend, const ConnectOptions& options) {
  const BackendRow row = find(backend);
  TESSERA_CHECK(row.available(), UsageError, "backend '", backend, "' (", row.help,
                ") cannot be used in this build or on this machine");
  return row.connect(options);
}

c10::intrusive_ptr<c10d::Backend> connect_checked(const std::string& backend, const ConnectOptions& options) {
  if (backend != "gloo" || options.size == 1) return connect(backend, options);
  return watch::connect_guarded(options, [](const ConnectOptions& gloo) { return connect("gloo", gloo); });
}

c10::intrusive_ptr<c10d::Backend> connect_both(const std::string& host, const std::string& device,
                                               const ConnectOptions& options) {
  ConnectOptions apart = options;
  apart.store = c10::make_intrusive<c10d::PrefixStore>(device, options.store);
  return detail::by_device(options, connect_checked(host, options), connect(device, apart));
}

}  // namespace tessera::comm
