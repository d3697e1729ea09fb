#include "tessera/nn/detail/writer.h"

#include "tessera/base/error.h"
#include "tessera/nn/detail/record.h"
#include "tessera/nn/detail/shape_run.h"

#include <algorithm>

namespace tessera::detail {
namespace {

using c10::IValue;

struct KeysOf : c10::TensorImpl {
  static c10::DispatchKeySet& get(c10::TensorImpl& impl) { return impl.*(&KeysOf::key_set_); }
};

void mark(const at::Tensor& t, c10::intrusive_ptr<DeferredMeta> meta, c10::Storage complaining) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_backend_meta(std::move(meta));
  KeysOf::get(*impl) = impl->key_set() | c10::DispatchKeySet(kDeferredKey);
  hide_memory(t, std::move(complaining));
}

// Ops that give all of their first argument a new value. tessera::philox_* do, too.
constexpr const char* kOverwriting[] = {"aten::copy_", "aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_"};

bool overwrites(const Step& step, const Tape& tape) {
  if (step.written.size() != 1 || !tape.value(step.written[0]).covers_storage) return false;
  const auto storage = tape.value(step.written[0]).storage;
  const auto uses = std::count_if(step.inputs.begin(), step.inputs.end(),
                                  [&](const auto& input) { return tape.value(input.second).storage == storage; });
  const auto name = toString(step.op.operator_name());
  return uses == 1 && (name.starts_with("tessera::philox_") ||
                       std::find(std::begin(kOverwriting), std::end(kOverwriting), name) != std::end(kOverwriting));
}

}  // namespace

Writer::Writer(const DeferredCall& call, std::shared_ptr<Tape> tape, c10::Device device)
    : tape_(std::move(tape)), device_(device), step_{call.op, {}, {}, {}, {}, {}} {
  size_t place = 0;
  for (size_t i = 0; i < call.arguments.size(); i++)
    step_.arguments.push_back(
        map_tensors(call.arguments[i], [&](const at::Tensor& t) { return argument(t, place++, call.is_written(i)); }));
  const auto device_argument = call.find("device");
  if (device_argument && step_.arguments[*device_argument].isDevice()) step_.arguments[*device_argument] = device;
}

at::Tensor Writer::argument(const at::Tensor& t, size_t place, bool is_written) {
  const auto* meta = deferred_meta(t);
  if (!meta) {
    if (t.defined()) step_.constants.emplace_back(t, t.is_inference() ? 0 : t._version());
    return t.defined() ? t.detach() : t;
  }
  const auto& value = tape_->value(meta->value);
  TESSERA_CHECK(meta->tape == tape_, UsageError, "deferred_init: ", toString(step_.op.operator_name()),
                " mixes tensors that were deferred on different threads; build the model on one");
  TESSERA_CHECK(t.sizes() == c10::IntArrayRef(value.sizes), UsageError,
                "deferred_init: ", toString(step_.op.operator_name()), " on a rank's piece, sizes ", t.sizes(),
                ", of a deferred tensor of sizes ", c10::IntArrayRef(value.sizes),
                "; work on tensors before they are distributed, or after materialize()");
  step_.inputs.emplace_back(place, meta->value);
  if (is_written) step_.written.push_back(meta->value);
  seen_.push_back({t, meta->value, meta->quiet, t.storage(), t.sizes().vec(), t.strides().vec()});
  return {};
}

void Writer::finish(const std::vector<IValue>& results) {
  for (const auto& v : results) each_tensor(v, [&](const at::Tensor& t) { step_.outputs.push_back(output(t)); });
  step_.overwrites = overwrites(step_, *tape_);
  tape_->add(std::move(step_));
}

Id Writer::output(const at::Tensor& t) {
  if (!t.defined()) return kNone;
  TESSERA_CHECK(t.is_meta(), InternalError, "deferred_init: ", toString(step_.op.operator_name()), " gave a tensor on ",
                t.device(), " for arguments on meta");
  const auto same_storage = [](const c10::Storage& a, const c10::Storage& b) {
    return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
  };
  Id storage = kNone;
  c10::Storage quiet = t.storage(), complaining;
  for (const auto& before : seen_) {
    const bool is_argument = before.tensor.is_same(t);
    if (is_argument && t.sizes() == c10::IntArrayRef(before.sizes) && t.strides() == c10::IntArrayRef(before.strides))
      return before.value;
    if (!is_argument && !same_storage(quiet, before.quiet)) continue;
    storage = tape_->value(before.value).storage;
    quiet = before.quiet;
    complaining = before.complaining;
  }
  if (storage == kNone) {
    storage = tape_->new_storage();
    complaining = complaining_storage(quiet);
  }
  const bool covers = t.is_non_overlapping_and_dense() && t.nbytes() == quiet.nbytes();
  const Id value =
      tape_->add({tape_->next_step(), storage, t.sizes().vec(), t.scalar_type(), device_, covers, t.is_contiguous()});
  mark(t, c10::make_intrusive<DeferredMeta>(tape_, value, quiet), complaining);
  // What follows, another result or a use as argument of this one, finds it among the known.
  seen_.push_back({t, value, quiet, complaining, t.sizes().vec(), t.strides().vec()});
  return value;
}

}  // namespace tessera::detail
