#include "tessera/nn/detail/deferred/op_recorder.h"

#include "tessera/base/error.h"
#include "tessera/nn/detail/deferred/record.h"
#include "tessera/nn/detail/deferred/meta_run.h"

#include <algorithm>

namespace tessera::detail::deferred {
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
  const auto where = call.find("device");
  if (where && step_.arguments[*where].isDevice()) step_.arguments[*where] = device;
  if (const auto copy = copy_to_set(call, device)) step_.arguments[*copy] = true;  // whatever device it is filled on
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
  seen_.emplace_back(
      t, c10::static_intrusive_pointer_cast<DeferredMeta>(t.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr()),
      t.storage());
  return {};
}

void Writer::finish(const std::vector<IValue>& results) {
  for (const auto& v : results) each_tensor(v, [&](const at::Tensor& t) { step_.outputs.push_back(output(t)); });
  const bool gives_nothing_new = std::none_of(step_.outputs.begin(), step_.outputs.end(), [&](Id v) {
    return v != kNone && tape_->value(v).step == tape_->next_step();
  });
  if (gives_nothing_new && step_.written.empty()) return;  // detach()
  step_.overwrites = overwrites(step_, *tape_);
  tape_->add(std::move(step_));
}

Id Writer::output(const at::Tensor& t) {
  if (!t.defined()) return kNone;
  TESSERA_CHECK(t.is_meta(), InternalError, "deferred_init: ", toString(step_.op.operator_name()), " gave a tensor on ",
                t.device(), " for arguments on meta");
  const Seen* base = nullptr;  // of which it is a view
  for (const auto& before : seen_) {
    const bool is_argument = before.tensor.is_same(t);
    if (!is_argument && t.storage().unsafeGetStorageImpl() != before.meta->quiet.unsafeGetStorageImpl()) continue;
    base = &before;
    if (!before.looks_like(t)) continue;
    mark(t, before.meta, before.complaining);
    return before.meta->value;
  }
  const auto storage = base ? tape_->value(base->meta->value).storage : tape_->new_storage();
  const auto quiet = base ? base->meta->quiet : t.storage();
  const auto complaining = base ? base->complaining : error_storage(quiet);
  const bool covers = t.is_non_overlapping_and_dense() && t.nbytes() == quiet.nbytes();
  const Id value =
      tape_->add({tape_->next_step(), storage, t.sizes().vec(), t.scalar_type(), device_, covers, t.is_contiguous()});
  auto meta = c10::make_intrusive<DeferredMeta>(tape_, value, quiet);
  mark(t, meta, complaining);
  seen_.emplace_back(t, std::move(meta), complaining);  // another result may share its memory
  return value;
}

Writer::Seen::Seen(const at::Tensor& t, c10::intrusive_ptr<DeferredMeta> meta, c10::Storage complaining)
    : tensor(t),
      meta(std::move(meta)),
      complaining(std::move(complaining)),
      sizes(t.sizes().vec()),
      strides(t.strides().vec()),
      offset(t.storage_offset()),
      dtype(t.scalar_type()),
      conjugated(t.is_conj()),
      negated(t.is_neg()) {}

bool Writer::Seen::looks_like(const at::Tensor& t) const {
  return t.sizes() == c10::IntArrayRef(sizes) && t.strides() == c10::IntArrayRef(strides) &&
         t.storage_offset() == offset && t.scalar_type() == dtype && t.is_conj() == conjugated && t.is_neg() == negated;
}

}  // namespace tessera::detail::deferred
