#include "tessera/comm/communicator.h"

#include "tessera/comm/detail/communicator_post.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera::comm {

thread_local constinit const detail::Posting* detail::posting = nullptr;

namespace {

// A program that never waits for its results must not grow without bound.
constexpr size_t kMostPending = 256;

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
  impl_->watched = dynamic_cast<watch::Watched*>(backend_.get());
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
  if (impl_->watched)
    impl_->watched->poison(reason);
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
    struct TypeRow {
      const char* backend;
      ProcessGroup::BackendType type;
      at::DeviceType device;
    };
    constexpr TypeRow kTypes[] = {{"gloo", ProcessGroup::GLOO, at::kCPU}, {"nccl", ProcessGroup::NCCL, at::kCUDA}};
    TypeRow row{"", ProcessGroup::CUSTOM, at::kCPU};
    for (const TypeRow& r : kTypes)
      if (impl_->backend_name == r.backend) row = r;
    group = c10::make_intrusive<ProcessGroup>(store_, static_cast<int>(rank_), static_cast<int>(size()));
    group->setBackend(row.device, row.type, backend_);
    // Ours carry tensors of any device, themselves or through another backend.
    if (row.type == ProcessGroup::CUSTOM) group->setBackend(at::kCUDA, row.type, backend_);
    group->setDefaultBackend(row.type);
    group->setGroupName(name_);
  }
  return group;
}

void Communicator::add_pending(const at::Tensor& result, Work work) {
  if (!work) return;
  Work oldest;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->pending.size() >= kMostPending) {
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
