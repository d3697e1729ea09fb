#include "tessera/comm/communicator.h"

#include "tessera/base/detail/libtorch_compat.h"
#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/communicator_post.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <numeric>

namespace tessera::comm {

thread_local constinit const detail::CurrentCollective* detail::current_collective = nullptr;

namespace {

// Bounds the memory of a program that never waits for its results.
constexpr size_t kMaxPending = 256;

// The Communicator of each c10d::ProcessGroup. A Communicator holds its ProcessGroup, so while the weak pointer is
// valid, the address cannot belong to another ProcessGroup.
class ProcessGroupTable {
 public:
  static ProcessGroupTable& instance() {
    static auto* table = new ProcessGroupTable();  // never destroyed: groups may outlive static objects
    return *table;
  }
  void add(const c10d::ProcessGroup* process_group, const Group& group) {
    std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
    groups_.insert_or_assign(process_group, c10::weak_intrusive_ptr<Communicator>(group));
  }
  Group find(const c10d::ProcessGroup* process_group) {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(process_group);
    return found == groups_.end() ? Group() : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<const c10d::ProcessGroup*, c10::weak_intrusive_ptr<Communicator>> groups_;
};

// The backends of a ProcessGroup for CPU and CUDA tensors. One entry if they are the same, or if one is missing.
std::vector<c10::intrusive_ptr<c10d::Backend>> backends_of(c10d::ProcessGroup& process_group) {
  std::vector<c10::intrusive_ptr<c10d::Backend>> found;
  for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
    auto backend = libtorch::backend_or_null(process_group, device);
    if (!backend) continue;
    if (found.empty() || found[0] != backend) found.push_back(std::move(backend));
  }
  TESSERA_CHECK(!found.empty(), UsageError,
                "group_from: the c10d::ProcessGroup has no backend for CPU or CUDA tensors; call setBackend() on it");
  return found;
}

// Not every backend has options.
c10::intrusive_ptr<c10d::Backend::Options> options_of(c10d::Backend& backend) {
  try {
    return backend.getBackendOptions();
  } catch (const c10::Error&) {
    return {};
  }
}

}  // namespace

Communicator::Communicator(std::string name, std::vector<int64_t> ranks, int64_t rank,
                           c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                           std::chrono::milliseconds timeout)
    : name_(std::move(name)),
      ranks_(std::move(ranks)),
      rank_(rank),
      backend_(std::move(backend)),
      store_(std::move(store)),
      timeout_(timeout),
      impl_(std::make_shared<Impl>()) {
  impl_->backend_name = backend_->getBackendName();
  impl_->monitored = dynamic_cast<watch::MonitoredBackend*>(backend_.get());
}

Communicator::Communicator(std::string name, const Communicator& same)
    : name_(std::move(name)),
      ranks_(same.ranks_),
      rank_(same.rank_),
      backend_(same.backend_),
      store_(same.store_),
      timeout_(same.timeout_),
      impl_(same.impl_) {}

Communicator::~Communicator() = default;

Group Communicator::alias(std::string name) const { return Group::make(std::move(name), *this); }

const char* Communicator::backend_name() const { return impl_->backend_name.c_str(); }
uint64_t Communicator::sequence() const { return impl_->sequence.load(std::memory_order_relaxed); }

void Communicator::abort(const std::string& reason) {
  if (impl_->monitored)
    impl_->monitored->abort_with(reason);
  else
    backend_->abort();
}

void Communicator::close() {
  if (std::exchange(impl_->closed, true)) return;
  {
    std::lock_guard lock(impl_->mutex);
    impl_->pending.clear();
    impl_->pending_count = 0;
  }
  impl_->process_group.reset();
  backend_->shutdown();
}

c10::intrusive_ptr<c10d::ProcessGroup> Communicator::process_group() {
  auto& group = impl_->process_group;
  if (!group) {
    using c10d::ProcessGroup;
    struct BackendTypeRow {
      const char* backend;
      ProcessGroup::BackendType type;
      at::DeviceType device;
    };
    constexpr BackendTypeRow kTypes[] = {{"gloo", ProcessGroup::GLOO, at::kCPU},
                                         {"nccl", ProcessGroup::NCCL, at::kCUDA}};
    BackendTypeRow row{"", ProcessGroup::CUSTOM, at::kCPU};
    for (const BackendTypeRow& r : kTypes)
      if (impl_->backend_name == r.backend) row = r;
    group = c10::make_intrusive<ProcessGroup>(store_, static_cast<int>(rank_), static_cast<int>(size()));
    group->setBackend(row.device, row.type, backend_);
    // Tessera's backends carry CPU and CUDA tensors.
    if (row.type == ProcessGroup::CUSTOM) group->setBackend(at::kCUDA, row.type, backend_);
    group->setDefaultBackend(row.type);
    group->setGroupName(name_);
    ProcessGroupTable::instance().add(group.get(), Group::unsafe_reclaim_from_nonowning(this));
  }
  return group;
}

Group Communicator::from(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) {
  if (!process_group) return {};
  auto& table = ProcessGroupTable::instance();
  if (auto known = table.find(process_group.get())) return known;
  const auto backends = backends_of(*process_group);
  ConnectOptions place;
  place.rank = process_group->getRank();
  place.size = process_group->getSize();
  auto backend = backends.size() == 1 ? backends[0] : detail::by_device(place, backends[0], backends[1]);
  const auto options = options_of(*backends[0]);
  std::vector<int64_t> ranks(static_cast<size_t>(place.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  if (options && options->global_ranks_in_group.size() == ranks.size())
    ranks.assign(options->global_ranks_in_group.begin(), options->global_ranks_in_group.end());
  auto store = process_group->getStore();
  if (store) store = c10::make_intrusive<c10d::PrefixStore>("tessera", store);
  const std::string name = process_group->getGroupName();
  auto group = c10::make_intrusive<Communicator>(name.empty() ? "process_group" : name, std::move(ranks), place.rank,
                                                 std::move(backend), std::move(store),
                                                 options ? options->timeout : kBackendDefaultTimeout);
  group->impl_->process_group = process_group;
  table.add(process_group.get(), group);
  return group;
}

void Communicator::add_pending(const at::Tensor& result, Work work) {
  if (!work) return;
  Work oldest;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->pending.size() >= kMaxPending) {
      oldest = impl_->pending.front().work;
      impl_->pending.erase(impl_->pending.begin());
    }
    impl_->pending.push_back({result.storage(), std::move(work)});
    impl_->pending_count.store(impl_->pending.size(), std::memory_order_release);
  }
  oldest.wait();
}

Work Communicator::take_pending(const at::Tensor& result) {
  if (impl_->pending_count.load(std::memory_order_acquire) == 0 || !result.has_storage()) return Work();
  auto* storage = result.storage().unsafeGetStorageImpl();
  std::lock_guard lock(impl_->mutex);
  auto& list = impl_->pending;
  for (size_t i = 0; i < list.size(); i++) {
    if (list[i].storage.unsafeGetStorageImpl() != storage) continue;
    Work work = std::move(list[i].work);
    list.erase(list.begin() + static_cast<ptrdiff_t>(i));
    impl_->pending_count.store(list.size(), std::memory_order_release);
    return work;
  }
  return Work();
}

size_t Communicator::pending() const { return impl_->pending_count.load(std::memory_order_acquire); }

}  // namespace tessera::comm
