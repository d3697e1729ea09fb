#include "tessera/comm/detail/region/host_tensors.h"

#include "tessera/base/error.h"

#include <ATen/ops/empty.h>

namespace tessera::comm::region {
namespace {

void check(const at::Tensor& x) {
  TESSERA_CHECK(x.layout() == at::kStrided && x.is_contiguous(), UsageError,
                "this backend needs contiguous dense tensors; found one of layout ", x.layout(), ", sizes ", x.sizes(),
                ". Call contiguous() first");
}
at::Tensor pinned_like(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options().device(at::kCPU).pinned_memory(true));
}

}  // namespace

at::Tensor HostTensors::input(const at::Tensor& x) {
  check(x);
  return x.is_cpu() ? x : pinned_like(x).copy_(x);
}

at::Tensor HostTensors::output(const at::Tensor& x) {
  check(x);
  if (x.is_cpu()) return x;
  copies_back_.emplace_back(x, pinned_like(x));
  return copies_back_.back().second;
}

at::Tensor HostTensors::inout(const at::Tensor& x) {
  at::Tensor host = output(x);
  return x.is_cpu() ? host : host.copy_(x);
}

std::function<void()> HostTensors::finish() {
  if (copies_back_.empty()) return {};
  return [copies = std::move(copies_back_)] {
    for (const auto& [to, from] : copies) to.copy_(from);
  };
}

}  // namespace tessera::comm::region
