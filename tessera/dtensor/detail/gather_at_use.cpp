#include "tessera/dtensor/detail/gather_at_use.h"

#include "tessera/dtensor/detail/arguments.h"
#include "tessera/dtensor/detail/edges.h"
#include "tessera/dtensor/detail/meta.h"

#include <ATen/core/List.h>

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace tessera::detail {
namespace {

using c10::IValue;
using propagate::ArgKind;

// A weak pointer keeps the address from being used again, not the memory.
using Mark = c10::weak_intrusive_ptr<c10::StorageImpl>;

class Marks {
 public:
  void add(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    std::erase_if(marks_, [](const auto& item) { return item.second.expired(); });
    marks_.try_emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
    count_.store(marks_.size(), std::memory_order_release);
  }
  bool none() const { return count_.load(std::memory_order_acquire) == 0; }
  bool has(const at::Tensor& t) const {
    const auto& local = local_of(t);
    if (!local.has_storage()) return false;
    const std::shared_lock lock(mutex_);
    return marks_.count(local.storage().unsafeGetStorageImpl()) != 0;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Mark> marks_;
  std::atomic<size_t> count_ = 0;
};

Marks& marks() {
  static auto* it = new Marks;  // tensors may outlive everything
  return *it;
}

at::Tensor gathered(const at::Tensor& t) {
  if (!is_dtensor(t)) return t;
  const auto& spec = *meta_of(t).spec;
  return local_of(move(t, with_placements(spec, Placements(spec.placements.size(), Replicate()))));
}

}  // namespace

void mark_gather_at_use(const at::Tensor& t) { marks().add(local_of(t).storage()); }

bool gather_marked(const propagate::OpEntry& entry, IValue* args) {
  if (C10_LIKELY(marks().none())) return false;
  bool plain = false, marked = false, other = false;
  for_each_tensor(entry, c10::ArrayRef<IValue>(args, entry.num_args()), [&](const at::Tensor& t, int arg, int) {
    if (!is_dtensor(t))
      plain |= !t.unsafeGetTensorImpl()->is_wrapped_number();
    else if (!entry.is_written(arg) && marks().has(t))
      marked = true;
    else
      other = true;
  });
  if (!plain || !marked || other) return false;
  for (size_t i = 0; i < entry.num_args(); i++) {
    auto& v = args[i];
    if (entry.kinds[i] == ArgKind::Tensor && v.isTensor() && v.toTensor().defined()) {
      v = gathered(v.toTensor());
    } else if (entry.kinds[i] == ArgKind::TensorList && v.isList()) {
      c10::List<at::Tensor> list;
      for (const auto& x : v.toListRef())
        list.push_back(x.toTensor().defined() ? gathered(x.toTensor()) : at::Tensor());
      v = std::move(list);
    } else if (entry.kinds[i] == ArgKind::OptionalTensorList && v.isList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& x : v.toListRef())
        list.push_back(x.isTensor() && x.toTensor().defined() ? std::optional(gathered(x.toTensor())) : std::nullopt);
      v = std::move(list);
    }
  }
  return true;
}

}  // namespace tessera::detail
