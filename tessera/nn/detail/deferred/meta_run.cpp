#include "tessera/nn/detail/deferred/meta_run.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/module_name.h"
#include "tessera/nn/detail/deferred/record.h"
#include "tessera/nn/detail/deferred/replay.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace tessera::detail::deferred {
namespace {

using c10::IValue;

// The storage may be exchanged although the tensor was detached, which forbids it to everyone else.
struct StorageOf : c10::TensorImpl {
  static c10::Storage& get(c10::TensorImpl& impl) { return impl.*(&StorageOf::storage_); }
};

// The deferred arguments of a call show their quiet storages while alive.
class Quiet {
 public:
  explicit Quiet(const DeferredCall& call) {
    for (const auto& v : call.arguments)
      each_tensor(v, [&](const at::Tensor& t) {
        const auto* meta = deferred_meta(t);
        if (!meta) return;
        auto& storage = StorageOf::get(*t.unsafeGetTensorImpl());
        before_.emplace_back(t, storage);
        storage = meta->quiet;
      });
  }
  ~Quiet() {
    for (auto it = before_.rbegin(); it != before_.rend(); ++it)
      StorageOf::get(*it->first.unsafeGetTensorImpl()) = it->second;
  }
  Quiet(const Quiet&) = delete;

 private:
  std::vector<std::pair<at::Tensor, c10::Storage>> before_;
};

// The geometry of a real tensor. A number that was written in the code stays, for its type gives way to others.
at::Tensor without_memory(const at::Tensor& t) {
  if (!t.defined() || t.is_meta() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}

std::vector<IValue> meta_arguments(const DeferredCall& call, c10::Device device) {
  std::vector<IValue> out;
  for (const auto& v : call.arguments) out.push_back(map_tensors(v, without_memory));
  const auto place = call.find("device");
  if (place && (call.is_factory() || out[*place].isDevice())) out[*place] = c10::Device(at::kMeta);
  if (const auto copy = copy_to_set(call, device)) out[*copy] = true;
  if (const auto pinned = call.find("pin_memory")) out[*pinned] = IValue();
  return out;
}

// What an in-place op returns: the arguments it writes. None: it returns something else.
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

// An op that writes into the tensors it is given for its results gives them the right sizes first.
bool has_out(const DeferredCall& call) {
  const auto& arguments = call.schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& a) { return a.is_out(); });
}

// The arguments may be this large where an op has to run to tell its shape.
constexpr int64_t kMostBytesToTry = int64_t{64} << 20;

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

// Runs the op for real, on the CPU, for the sizes of its results.
std::vector<IValue> tried_results(const DeferredCall& call) {
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
  const auto place = call.find("device");
  const bool is_given = place && call.arguments[*place].isDevice();
  if (is_given && !call.arguments[*place].toDevice().is_meta()) return call.arguments[*place].toDevice();
  if (call.first) return tape.value(call.first->value).device;
  // torch::zeros(n, weight.options()): where the first one is.
  return is_given && tape.has_values() ? tape.value(0).device : c10::Device(at::kCPU);
}

std::optional<size_t> copy_to_set(const DeferredCall& call, c10::Device device) {
  const auto copy = call.find("copy");
  const bool goes = call.first && call.first->tape->value(call.first->value).device != device;
  return goes ? copy : std::nullopt;
}

std::optional<std::vector<IValue>> run_on_meta(const DeferredCall& call, c10::Device device, torch::jit::Stack* stack) {
  try {
    const Quiet quiet(call);
    c10::impl::ExcludeDispatchKeyGuard below(kDeferredKey);
    auto arguments = meta_arguments(call, device);
    call.op.callBoxed(arguments);
    return arguments;
  } catch (const c10::NotImplementedError&) {  // so it is for a third of aten's ops, in C++
  }
  if (!has_out(call))
    if (auto results = written_arguments(call)) return results;
  const auto bytes = bytes_of(call);
  if (bytes <= kMostBytesToTry) return tried_results(call);
  if (!has_out(call) && decompose(call.op, stack)) return {};
  TESSERA_FAIL(UsageError, "deferred_init: ", call.name(), in_module(),
               " has no kernel for the meta device, and its arguments, ", bytes,
               " bytes, are too large to try it for the sizes of its result. Write into a tensor that is there ",
               "(x.relu_(), x.masked_fill_(...)), or build this after materialize()");
}

c10::Storage error_storage(const c10::Storage& quiet) {
  auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), quiet.nbytes(),
                                                    c10::DataPtr(nullptr, c10::Device(at::kMeta)), nullptr,
                                                    /*resizable=*/false);
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "this tensor was made in deferred_init and has no memory yet: materialize(module) gives it some. "
      "(In deferred_init, torch::tensor({...}) holds its values; at::tensor({...}) cannot.)");
  return c10::Storage(std::move(impl));
}

void hide_memory(const at::Tensor& t, c10::Storage complaining) {
  StorageOf::get(*t.unsafeGetTensorImpl()) = std::move(complaining);
}

}  // namespace tessera::detail::deferred
