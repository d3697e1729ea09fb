#include "tessera/dtensor/detail/all_gather_on_use.h"

#include "tessera/dtensor/detail/arguments.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/dtensor/detail/meta.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace tessera::detail {
namespace {

using c10::IValue;

class MarkedStorages {
 public:
  void add(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    std::erase_if(marks_, [](const auto& item) { return item.second.expired(); });
    marks_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
    count_.store(marks_.size(), std::memory_order_release);
  }
  bool empty() const { return count_.load(std::memory_order_acquire) == 0; }
  bool has(const at::Tensor& t) const {
    const auto& local = local_of(t);
    if (!local.has_storage()) return false;
    const std::shared_lock lock(mutex_);
    return marks_.count(local.storage().unsafeGetStorageImpl()) != 0;
  }

 private:
  mutable std::shared_mutex mutex_;
  // The weak pointer prevents reuse of the address, but does not keep the data.
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> marks_;
  std::atomic<size_t> count_ = 0;
};

MarkedStorages& marked_storages() {
  static auto* storages = new MarkedStorages;  // never destroyed: tensors may outlive static objects
  return *storages;
}

at::Tensor all_gathered(const at::Tensor& t) {
  if (!is_dtensor(t)) return t;
  const auto& spec = *meta_of(t).spec;
  return local_of(redistribute_no_grad(t, with_placements(spec, Placements(spec.placements.size(), Replicate()))));
}

}  // namespace

void mark_all_gather_on_use(const at::Tensor& t) { marked_storages().add(local_of(t).storage()); }

bool all_gather_marked_inputs(const propagate::OpEntry& entry, IValue* args) {
  if (C10_LIKELY(marked_storages().empty())) return false;
  bool plain = false, marked = false, other = false;
  for_each_tensor(entry, c10::ArrayRef<IValue>(args, entry.num_args()), [&](const at::Tensor& t, int arg, int) {
    if (!is_dtensor(t))
      plain |= !t.unsafeGetTensorImpl()->is_wrapped_number();
    else if (!entry.is_written(arg) && marked_storages().has(t))
      marked = true;
    else
      other = true;
  });
  if (!plain || !marked || other) return false;
  replace_tensors(entry, args, [](const at::Tensor& t, int) { return all_gathered(t); });
  return true;
}

}  // namespace tessera::detail
