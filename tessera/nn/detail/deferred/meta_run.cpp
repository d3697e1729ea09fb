#include "tessera/nn/detail/deferred/meta_run.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/nn/detail/deferred/record.h"
#include "tessera/nn/detail/deferred/replay.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace tessera::detail::deferred {
namespace {

using c10::IValue;

// Gives access to storage_. The public setter refuses tensors from detach().
struct StorageAccess : c10::TensorImpl {
  static c10::Storage& get(c10::TensorImpl& impl) { return impl.*(&StorageAccess::storage_); }
};

// In this scope, the deferred arguments of a call have their meta storages.
class MetaStorageScope {
 public:
  explicit MetaStorageScope(const DeferredCall& call) {
    for (const auto& v : call.arguments)
      each_tensor(v, [&](const at::Tensor& t) {
        const auto* meta = deferred_meta(t);
        if (!meta) return;
        auto& storage = StorageAccess::get(*t.unsafeGetTensorImpl());
        before_.emplace_back(t, storage);
        storage = meta->meta_storage;
      });
  }
  ~MetaStorageScope() {
    for (auto it = before_.rbegin(); it != before_.rend(); ++it)
      StorageAccess::get(*it->first.unsafeGetTensorImpl()) = it->second;
  }
  MetaStorageScope(const MetaStorageScope&) = delete;

 private:
  std::vector<std::pair<at::Tensor, c10::Storage>> before_;
};

// A meta tensor with the geometry of a real tensor. A wrapped number stays as it is, because its dtype has a lower
// priority in type promotion.
at::Tensor without_memory(const at::Tensor& t) {
  if (!t.defined() || t.is_meta() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}

std::vector<IValue> meta_arguments(const DeferredCall& call, c10::Device device) {
  std::vector<IValue> out;
  for (const auto& v : call.arguments) out.push_back(map_tensors(v, without_memory));
  const auto index = call.find("device");
  if (index && (call.is_factory() || out[*index].isDevice())) out[*index] = c10::Device(at::kMeta);
  if (const auto copy = copy_to_set(call, device)) out[*copy] = true;
  if (const auto pinned = call.find("pin_memory")) out[*pinned] = IValue();
  return out;
}

// The outputs of an in-place op: the arguments that it writes. nullopt: the op also returns something else.
std::optional<std::vector<IValue>> written_arguments(const DeferredCall& call) {
  std::vector<IValue> results;
  for (const auto& r : call.schema.returns()) {
    if (!r.alias_info() || !r.alias_info()->isWrite()) return {};
    for (size_t i = 0; i < call.arguments.size(); i++) {
      const auto* alias = call.schema.arguments()[i].alias_info();
      if (alias && alias->beforeSets() == r.alias_info()->beforeSets()) results.push_back(call.arguments[i]);
    }
  }
  return results;
}

// Whether the op has `out` arguments, which it resizes.
bool has_out(const DeferredCall& call) {
  const auto& arguments = call.schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& a) { return a.is_out(); });
}

// If an op must run on real data to find the sizes of its outputs, its arguments may be at most this large.
constexpr int64_t kMaxTrialBytes = int64_t{64} << 20;

int64_t bytes_of(const DeferredCall& call) {
  int64_t bytes = 0;
  for (const auto& v : call.arguments)
    each_tensor(v, [&](const at::Tensor& t) { bytes += t.defined() ? static_cast<int64_t>(t.nbytes()) : 0; });
  return bytes;
}

std::vector<at::Tensor> flat(const std::vector<IValue>& values) {
  std::vector<at::Tensor> out;
  for (const auto& v : values) each_tensor(v, [&](const at::Tensor& t) { out.push_back(t); });
  return out;
}

// Runs the op on real data, on the CPU, to find the sizes of its outputs.
std::vector<IValue> results_of_trial_run(const DeferredCall& call) {
  c10::impl::ExcludeDispatchKeyGuard below(kDeferredKey);
  at::NoGradGuard no_grad;
  std::vector<Id> inputs;
  for (const auto& t : flat(call.arguments))
    if (const auto* meta = deferred_meta(t)) inputs.push_back(meta->value);
  const auto real = replay(*call.first->tape, inputs, c10::Device(at::kCPU));
  size_t next = 0;
  std::vector<IValue> results;
  for (const auto& v : call.arguments)
    results.push_back(map_tensors(v, [&](const at::Tensor& t) { return deferred_meta(t) ? real[next++] : t; }));
  call.op.callBoxed(results);
  for (auto& v : results) v = map_tensors(v, without_memory);
  auto written = written_arguments(call);
  if (!written) return results;
  const auto sized = flat(results), given = flat(*written);
  for (size_t i = 0; i < given.size(); i++)
    given[i].unsafeGetTensorImpl()->set_sizes_and_strides(sized[i].sizes(), sized[i].strides());
  return *written;
}

}  // namespace

c10::Device real_device(const DeferredCall& call, const Tape& tape) {
  const auto index = call.find("device");
  const bool is_given = index && call.arguments[*index].isDevice();
  if (is_given && !call.arguments[*index].toDevice().is_meta()) return call.arguments[*index].toDevice();
  if (call.first) return tape.value(call.first->value).device;
  // torch::zeros(n, weight.options()): the device of the first value.
  return is_given && tape.has_values() ? tape.value(0).device : c10::Device(at::kCPU);
}

std::optional<size_t> copy_to_set(const DeferredCall& call, c10::Device device) {
  const auto copy = call.find("copy");
  const bool changes_device = call.first && call.first->tape->value(call.first->value).device != device;
  return changes_device ? copy : std::nullopt;
}

std::optional<std::vector<IValue>> run_on_meta(const DeferredCall& call, c10::Device device, torch::jit::Stack* stack) {
  try {
    const MetaStorageScope scope(call);
    c10::impl::ExcludeDispatchKeyGuard below(kDeferredKey);
    auto arguments = meta_arguments(call, device);
    call.op.callBoxed(arguments);
    return arguments;
  } catch (const c10::NotImplementedError&) {  // a third of the aten ops have no meta kernel in C++
  }
  if (!has_out(call))
    if (auto results = written_arguments(call)) return results;
  const auto bytes = bytes_of(call);
  if (bytes <= kMaxTrialBytes) return results_of_trial_run(call);
  if (!has_out(call) && decompose(call.op, stack)) return {};
  TESSERA_FAIL(UsageError, "deferred_init: ", call.name(), in_module(),
               " has no kernel for the meta device, and its arguments, ", bytes,
               " bytes, are too large to run it just for the sizes of its outputs. Use an in-place op ",
               "(x.relu_(), x.masked_fill_(...)), or call it after materialize()");
}

c10::Storage make_error_storage(const c10::Storage& meta_storage) {
  auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), meta_storage.nbytes(),
                                                    c10::DataPtr(nullptr, c10::Device(at::kMeta)), nullptr,
                                                    /*resizable=*/false);
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "this tensor was made in deferred_init and has no memory yet: materialize(module) allocates it. "
      "(In deferred_init, torch::tensor({...}) is a real tensor with values; at::tensor({...}) is not supported.)");
  return c10::Storage(std::move(impl));
}

void set_storage(const at::Tensor& t, c10::Storage error_storage) {
  StorageAccess::get(*t.unsafeGetTensorImpl()) = std::move(error_storage);
}

}  // namespace tessera::detail::deferred
