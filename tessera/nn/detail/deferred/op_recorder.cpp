#include "tessera/nn/detail/deferred/op_recorder.h"

#include "tessera/base/error.h"
#include "tessera/nn/detail/deferred/meta_run.h"
#include "tessera/nn/detail/deferred/record.h"

#include <algorithm>

namespace tessera::detail::deferred {
namespace {

using c10::IValue;

struct KeySetAccess : c10::TensorImpl {
  static c10::DispatchKeySet& get(c10::TensorImpl& impl) { return impl.*(&KeySetAccess::key_set_); }
};

void mark_deferred(const at::Tensor& t, c10::intrusive_ptr<DeferredMeta> meta, c10::Storage error_storage) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_backend_meta(std::move(meta));
  KeySetAccess::get(*impl) = impl->key_set() | c10::DispatchKeySet(kDeferredKey);
  set_storage(t, std::move(error_storage));
}

// Ops that overwrite all elements of their first argument. The ops tessera::philox_* do so as well.
constexpr const char* kOverwriting[] = {"aten::copy_", "aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_"};

bool overwrites(const RecordedOp& op, const Tape& tape) {
  if (op.written.size() != 1 || !tape.value(op.written[0]).covers_storage) return false;
  const auto storage = tape.value(op.written[0]).storage;
  const auto uses = std::count_if(op.inputs.begin(), op.inputs.end(),
                                  [&](const auto& input) { return tape.value(input.second).storage == storage; });
  const auto name = toString(op.op.operator_name());
  return uses == 1 && (name.starts_with("tessera::philox_") ||
                       std::find(std::begin(kOverwriting), std::end(kOverwriting), name) != std::end(kOverwriting));
}

}  // namespace

OpRecorder::OpRecorder(const DeferredCall& call, std::shared_ptr<Tape> tape, c10::Device device)
    : tape_(std::move(tape)), device_(device), op_{call.op, {}, {}, {}, {}, {}} {
  size_t index = 0;
  for (size_t i = 0; i < call.arguments.size(); i++)
    op_.arguments.push_back(
        map_tensors(call.arguments[i], [&](const at::Tensor& t) { return argument(t, index++, call.is_written(i)); }));
  const auto device_index = call.find("device");
  if (device_index && op_.arguments[*device_index].isDevice()) op_.arguments[*device_index] = device;
  if (const auto copy = copy_to_set(call, device)) op_.arguments[*copy] = true;  // for any device of the replay
}

at::Tensor OpRecorder::argument(const at::Tensor& t, size_t index, bool is_written) {
  const auto* meta = deferred_meta(t);
  if (!meta) {
    if (t.defined()) op_.constants.emplace_back(t, t.is_inference() ? 0 : t._version());
    return t.defined() ? t.detach() : t;
  }
  const auto& value = tape_->value(meta->value);
  TESSERA_CHECK(meta->tape == tape_, UsageError, "deferred_init: ", toString(op_.op.operator_name()),
                " has arguments that were deferred on different threads; build the model on one thread");
  TESSERA_CHECK(t.sizes() == c10::IntArrayRef(value.sizes), UsageError,
                "deferred_init: ", toString(op_.op.operator_name()), " on a local shard, sizes ", t.sizes(),
                ", of a deferred tensor of sizes ", c10::IntArrayRef(value.sizes),
                "; call it before the tensor is distributed, or after materialize()");
  op_.inputs.emplace_back(index, meta->value);
  if (is_written) op_.written.push_back(meta->value);
  snapshots_.emplace_back(
      t, c10::static_intrusive_pointer_cast<DeferredMeta>(t.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr()),
      t.storage());
  return {};
}

void OpRecorder::finish(const std::vector<IValue>& outputs) {
  for (const auto& v : outputs) each_tensor(v, [&](const at::Tensor& t) { op_.outputs.push_back(output(t)); });
  const bool has_new_value = std::any_of(op_.outputs.begin(), op_.outputs.end(), [&](Id v) {
    return v != kNone && tape_->value(v).made_by == tape_->next_op();
  });
  if (!has_new_value && op_.written.empty()) return;  // detach(), for example
  op_.overwrites = overwrites(op_, *tape_);
  tape_->add(std::move(op_));
}

Id OpRecorder::output(const at::Tensor& t) {
  if (!t.defined()) return kNone;
  TESSERA_CHECK(t.is_meta(), InternalError, "deferred_init: ", toString(op_.op.operator_name()),
                " returned a tensor on ", t.device(), " for arguments on meta");
  const Snapshot* base = nullptr;  // t is a view of its tensor
  for (const auto& before : snapshots_) {
    const auto* storage_before = before.meta->meta_storage.unsafeGetStorageImpl();
    if (!before.tensor.is_same(t) && t.storage().unsafeGetStorageImpl() != storage_before) continue;
    base = &before;
    if (!before.same_geometry(t)) continue;
    mark_deferred(t, before.meta, before.error_storage);
    return before.meta->value;
  }
  const auto storage = base ? tape_->value(base->meta->value).storage : tape_->new_storage();
  const auto meta_storage = base ? base->meta->meta_storage : t.storage();
  const auto error_storage = base ? base->error_storage : make_error_storage(meta_storage);
  const bool covers = t.is_non_overlapping_and_dense() && t.nbytes() == meta_storage.nbytes();
  const Id value =
      tape_->add({tape_->next_op(), storage, t.sizes().vec(), t.scalar_type(), device_, covers, t.is_contiguous()});
  auto meta = c10::make_intrusive<DeferredMeta>(tape_, value, meta_storage);
  mark_deferred(t, meta, error_storage);
  snapshots_.emplace_back(t, std::move(meta), error_storage);  // another output may share its memory
  return value;
}

OpRecorder::Snapshot::Snapshot(const at::Tensor& t, c10::intrusive_ptr<DeferredMeta> meta, c10::Storage error_storage)
    : tensor(t),
      meta(std::move(meta)),
      error_storage(std::move(error_storage)),
      sizes(t.sizes().vec()),
      strides(t.strides().vec()),
      offset(t.storage_offset()),
      dtype(t.scalar_type()),
      conjugated(t.is_conj()),
      negated(t.is_neg()) {}

bool OpRecorder::Snapshot::same_geometry(const at::Tensor& t) const {
  return t.sizes() == c10::IntArrayRef(sizes) && t.strides() == c10::IntArrayRef(strides) &&
         t.storage_offset() == offset && t.scalar_type() == dtype && t.is_conj() == conjugated && t.is_neg() == negated;
}

}  // namespace tessera::detail::deferred
