#include "tessera/nn/saved_tensor_hooks.h"

#include "tessera/base/error.h"
#include "tessera/nn/detail/engine.h"

#include <utility>

namespace tessera {
namespace {
thread_local std::vector<PackerRef> active_packers;
}  // namespace

SavedTensorHooks::SavedTensorHooks(Packer packer)
    : SavedTensorHooks(std::make_shared<const Packer>(std::move(packer))) {}
SavedTensorHooks::SavedTensorHooks(PackerRef packer) {
  detail::require_engine();
  active_packers.push_back(std::move(packer));
}
SavedTensorHooks::~SavedTensorHooks() { active_packers.pop_back(); }

VersionedTensor::VersionedTensor(const at::Tensor& t) : tensor_(t.tensor_data()), version_(t._version()) {}
const at::Tensor& VersionedTensor::get() const {
  TESSERA_CHECK(tensor_._version() == version_, UsageError, "a tensor of sizes ", tensor_.sizes(),
                " that is needed for gradient computation was modified in place since it was saved (it is at version ",
                tensor_._version(), ", expected version ", version_,
                "). Use the out-of-place form of the op, or modify a clone().");
  return tensor_;
}

namespace detail {

const std::vector<PackerRef>& packers() { return active_packers; }

OnlyPackers::OnlyPackers(std::vector<PackerRef> packers) : before_(std::exchange(active_packers, std::move(packers))) {}
OnlyPackers::~OnlyPackers() { active_packers = std::move(before_); }

}  // namespace detail
}  // namespace tessera
