#include "tessera/comm/detail/region/host_tensors.h"

#include "tessera/base/error.h"

#include <ATen/ops/empty.h>

namespace tessera::comm::region {
namespace {

void check(const at::Tensor& x) {
  TESSERA_CHECK(x.layout() == at::kStrided && x.is_contiguous(), UsageError,
                "this backend moves contiguous dense tensors; found one of layout ", x.layout(), ", sizes ", x.sizes(),
                ". Call contiguous() first");
}
at::Tensor pinned_like(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options().device(at::kCPU).pinned_memory(true));
}

}  // namespace

at::Tensor HostTensors::given(const at::Tensor& x) {
  check(x);
  return x.is_cpu() ? x : pinned_like(x).copy_(x);
}

at::Tensor HostTensors::taken(const at::Tensor& x) {
  check(x);
  if (x.is_cpu()) return x;
  back_.emplace_back(x, pinned_like(x));
  return back_.back().second;
}

at::Tensor HostTensors::both(const at::Tensor& x) {
  at::Tensor host = taken(x);
  return x.is_cpu() ? host : host.copy_(x);
}

std::function<void()> HostTensors::finish() {
  if (back_.empty()) return {};
  return [back = std::move(back_)] {
    for (const auto& [to, from] : back) to.copy_(from);
  };
}

}  // namespace tessera::comm::region
