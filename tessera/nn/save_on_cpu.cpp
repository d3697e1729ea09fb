#include "tessera/nn/save_on_cpu.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/meta.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace tessera {
namespace {

// A copy on the CPU with the strides of a dense tensor.
at::Tensor copy_to_cpu(const at::Tensor& t, bool pin_memory) {
  auto copy = at::empty_like(t, t.options().device(at::kCPU).pinned_memory(pin_memory));
  copy.copy_(t, /*non_blocking=*/pin_memory);
  return copy;
}

Unpack pack(const at::Tensor& t, bool pin_memory) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (t.device().is_cpu()) return [saved = VersionedTensor(t)] { return saved.get(); };
  const bool distributed = is_dtensor(t);
  auto spec = distributed ? detail::meta_of(t).spec : SpecRef();
  const auto& local = distributed ? detail::local_of(t) : t;
  return [copy = copy_to_cpu(local, pin_memory), device = t.device(), spec, pin_memory]() -> at::Tensor {
    auto back = copy.to(device, /*non_blocking=*/pin_memory);
    return spec ? detail::wrap(std::move(back), spec) : back;
  };
}

}  // namespace

SaveOnCpu::SaveOnCpu(SaveOnCpuOptions options)
    : scope_(Packer{Accepts::AllTensors, [options](const at::Tensor& t) { return pack(t, options.pin_memory); }}) {
  TESSERA_CHECK(!options.pin_memory || at::globalContext().hasCUDA(), UsageError,
                "SaveOnCpu: pin_memory needs CUDA, and this process has no CUDA device; use pin_memory = false");
}

}  // namespace tessera
