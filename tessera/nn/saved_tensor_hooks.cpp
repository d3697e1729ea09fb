#include "tessera/nn/saved_tensor_hooks.h"

#include "tessera/base/error.h"
#include "tessera/nn/detail/engine.h"

#include <utility>

namespace tessera {
namespace {
thread_local std::vector<PackerRef> on;
}  // namespace

SavedTensorHooks::SavedTensorHooks(Packer packer) : SavedTensorHooks(std::make_shared<const Packer>(std::move(packer))) {}
SavedTensorHooks::SavedTensorHooks(PackerRef packer) {
  detail::require_engine();
  on.push_back(std::move(packer));
}
SavedTensorHooks::~SavedTensorHooks() { on.pop_back(); }

VersionedTensor::VersionedTensor(const at::Tensor& t) : tensor_(t.tensor_data()), version_(t._version()) {}
const at::Tensor& VersionedTensor::get() const {
  TESSERA_CHECK(tensor_._version() == version_, UsageError, "a tensor of sizes ", tensor_.sizes(),
                " that is needed for a gradient was written to in place since it was saved (it is at version ",
                tensor_._version(), ", was saved at ", version_,
                "). Use the form of the op that returns a new tensor, or write to a clone().");
  return tensor_;
}

namespace detail {

const std::vector<PackerRef>& packers() { return on; }

OnlyPackers::OnlyPackers(std::vector<PackerRef> packers) : before_(std::exchange(on, std::move(packers))) {}
OnlyPackers::~OnlyPackers() { on = std::move(before_); }

}  // namespace detail
}  // namespace tessera
