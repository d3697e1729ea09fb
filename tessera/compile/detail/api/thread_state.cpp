#include "tessera/compile/detail/api/thread_state.h"

#include "tessera/tracing/detail/invariant_scope.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <string_view>

namespace tessera::compiler {
namespace {

struct StateField {
  const char* name;
  int bits;  // 8 of a dtype or number
  uint64_t (*read)();
};

uint64_t float32_precision() {
  try {
    return static_cast<uint64_t>(at::globalContext().float32MatmulPrecision());
  } catch (const c10::Error&) {  // LibTorch's old and new settings contradict one another
    return 3;
  }
}

// The fields of ThreadState::modes, from the lowest bit.
constexpr StateField kThreadStateFields[] = {
    {"grad mode", 1, [] { return uint64_t{at::GradMode::is_enabled()}; }},
    {"inference mode", 1, [] { return uint64_t{c10::InferenceMode::is_enabled()}; }},
    {"autocast on the CPU", 1, [] { return uint64_t{at::autocast::is_autocast_enabled(at::kCPU)}; }},
    {"autocast on CUDA", 1, [] { return uint64_t{at::autocast::is_autocast_enabled(at::kCUDA)}; }},
    {"the autocast cache", 1, [] { return uint64_t{at::autocast::is_autocast_cache_enabled()}; }},
    {"the autocast dtype of the CPU", 8,
     [] { return static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCPU)); }},
    {"the autocast dtype of CUDA", 8,
     [] { return static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCUDA)); }},
    {"the default dtype", 8, [] { return static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()); }},
    {"deterministic algorithms", 1, [] { return uint64_t{at::globalContext().deterministicAlgorithms()}; }},
    {"the warning instead of an error of deterministic algorithms", 1,
     [] { return uint64_t{at::globalContext().deterministicAlgorithmsWarnOnly()}; }},
    {"the filling of uninitialized memory", 1,
     [] { return uint64_t{at::globalContext().deterministicFillUninitializedMemory()}; }},
    {"deterministic cuDNN", 1, [] { return uint64_t{at::globalContext().deterministicCuDNN()}; }},
    {"flash attention", 1, [] { return uint64_t{at::globalContext().userEnabledFlashSDP()}; }},
    {"memory efficient attention", 1, [] { return uint64_t{at::globalContext().userEnabledMemEfficientSDP()}; }},
    {"cuDNN attention", 1, [] { return uint64_t{at::globalContext().userEnabledCuDNNSDP()}; }},
    {"oneDNN", 1, [] { return uint64_t{at::globalContext().userEnabledMkldnn()}; }},
    {"NNPACK", 1, [] { return uint64_t{at::globalContext().userEnabledNNPACK()}; }},
    {"cuDNN", 1, [] { return uint64_t{at::globalContext().userEnabledCuDNN()}; }},
    {"benchmarks of cuDNN", 1, [] { return uint64_t{at::globalContext().benchmarkCuDNN()}; }},
    {"anomaly mode", 1, [] { return uint64_t{torch::autograd::AnomalyMode::is_enabled()}; }},
    {"checks for NaN in anomaly mode", 1, [] { return uint64_t{torch::autograd::AnomalyMode::should_check_nan()}; }},
    {"forward-mode AD", 1, [] { return uint64_t{c10::AutogradState::get_tls_state().get_fw_grad_mode()}; }},
    {"the number of threads", 8, [] { return static_cast<uint64_t>(at::get_num_threads()) & 0xFF; }},
    {"the precision of float32 products", 2, float32_precision},
    {"Numerics::Invariant", 1, [] { return uint64_t{invariant_scope_is_open()}; }},
    {"math attention", 1, [] { return uint64_t{at::globalContext().userEnabledMathSDP()}; }},
};

// 0 on a machine without CUDA.
int64_t current_stream() {
  static const bool has_cuda = at::hasCUDA() && at::getNumGPUs() > 0;
  if (!has_cuda) return 0;
  const auto* cuda = c10::impl::getDeviceGuardImpl(c10::kCUDA);
  try {
    return static_cast<int64_t>(cuda->getStream(cuda->getDevice()).hash());
  } catch (const c10::Error&) {  // a child of fork() cannot use CUDA
    return 0;
  }
}

}  // namespace

ThreadState ThreadState::now() {
  ThreadState state;
  int shift = 0;
  for (const auto& field : kThreadStateFields) {
    state.modes |= field.read() << shift;
    shift += field.bits;
  }
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  state.included_keys = keys.included_.raw_repr();
  state.excluded_keys = keys.excluded_.raw_repr();
  state.stream = current_stream();
  return state;
}

std::string ThreadState::difference(const ThreadState& before) const {
  int shift = 0;
  for (const auto& field : kThreadStateFields) {
    const auto mask = (uint64_t{1} << field.bits) - 1;
    const auto is = modes >> shift & mask, was = before.modes >> shift & mask;
    shift += field.bits;
    if (is == was) continue;
    if (field.bits == 1) return c10::str(field.name, is ? " is on, it was off" : " is off, it was on");
    if (std::string_view(field.name).find("dtype") == std::string_view::npos)
      return c10::str(field.name, " is ", is, ", it was ", was);
    return c10::str(field.name, " is ", static_cast<c10::ScalarType>(is), ", it was ",
                    static_cast<c10::ScalarType>(was));
  }
  if (stream != before.stream) return "the current CUDA stream is another one";
  return included_keys == before.included_keys && excluded_keys == before.excluded_keys
             ? ""
             : "this thread includes or excludes other dispatch keys";
}

}  // namespace tessera::compiler
