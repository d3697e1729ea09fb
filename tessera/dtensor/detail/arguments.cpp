#include "tessera/dtensor/detail/arguments.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <bit>

namespace tessera::detail {

using c10::IValue;
using propagate::ArgKind;
using propagate::Key;
using propagate::OpEntry;

namespace {

void read_static(Reader& reader, const OpEntry& entry, const IValue& v, bool by_value) {
  if (v.isInt()) return reader.read(v.toInt());
  if (v.isNone()) return reader.key.push(propagate::kNone);
  if (v.isBool()) return reader.read(v.toBool());
  if (v.isDouble())
    return by_value ? reader.key.push(std::bit_cast<uint64_t>(v.toDouble())) : reader.read(v.toDouble());
  if (v.isList()) {
    const auto list = v.toListRef();
    reader.key.push(list.size());
    for (const auto& x : list) read_static(reader, entry, x, by_value);
    return;
  }
  if (v.isString()) return reader.key.push(std::hash<std::string>{}(v.toStringRef()));
  if (v.isDevice()) return reader.read(v.toDevice());
  if (v.isComplexDouble()) return reader.key.push(3);
  if (v.isGenerator()) return reader.key.push(4);
  if (v.isTensor()) return reader.read(v.toTensor());
  TESSERA_FAIL(InternalError, entry.name, ": no decision key for an argument of kind ", v.tagKind());
}

}  // namespace

void read_boxed(const OpEntry& entry, c10::ArrayRef<IValue> args, Key& key) {
  Reader reader{key, {}};
  if (entry.view) key.push(in_backward());
  const auto* rule = entry.rule();
  const bool by_value = rule && rule->reads_scalars;
  for (size_t i = 0; i < entry.num_args(); i++) {
    const auto& v = args[i];
    switch (entry.kinds[i]) {
      case ArgKind::Tensor:
        if (v.isTensor())
          reader.read(v.toTensor());
        else
          key.push(propagate::kUndefined);
        break;
      case ArgKind::TensorList:
      case ArgKind::OptionalTensorList: {
        if (!v.isList()) {
          key.push(propagate::kNone);
          break;
        }
        const auto list = v.toListRef();
        key.push(list.size());
        for (const auto& x : list)
          if (x.isTensor())
            reader.read(x.toTensor());
          else
            key.push(propagate::kUndefined);
        break;
      }
      case ArgKind::Scalar:
        if (v.isNone()) {
          key.push(propagate::kNone);
        } else {
          reader.read(v.toScalar());
          if (by_value && !v.isComplexDouble()) key.push(std::bit_cast<uint64_t>(v.toScalar().toDouble()));
        }
        break;
      case ArgKind::ScalarList: {  // keyed by type: learning rates change from step to step
        if (!v.isList()) {
          key.push(propagate::kNone);
          break;
        }
        const auto list = v.toListRef();
        key.push(list.size());
        for (const auto& x : list) {
          reader.read(x.toScalar());
          if (by_value) key.push(std::bit_cast<uint64_t>(x.toScalar().toDouble()));
        }
        break;
      }
      case ArgKind::Other:
        read_static(reader, entry, v, by_value);
        break;
    }
  }
}

const std::string& name_of(const OpEntry& entry, int arg) { return entry.op.schema().arguments()[arg].name(); }

namespace {

at::Tensor as_replicated(const at::Tensor& t, const TensorSpec& like) {
  at::AutoDispatchBelowADInplaceOrView below;
  const Placements replicated(like.placements.size(), Replicate());
  auto spec = intern(like.mesh, replicated, t.sizes(), t.strides(), t.scalar_type(), t.device());
  return wrap(at::alias(t), std::move(spec));
}

// True for a parameter that accepts plain inputs, and for a view of one: Linear multiplies by weight.t().
bool accepts_plain(const at::Tensor& t) {
  if (meta_of(t).accepts_plain) return true;
  if (!t.is_view()) return false;
  const at::Tensor base(t._base());
  return is_dtensor(base) && meta_of(base).accepts_plain;
}

// Converts the gradient of a plain tensor to a plain one. The op that produced the tensor cannot handle DTensors.
struct PlainGradient final : torch::autograd::FunctionPreHook {
  explicit PlainGradient(int64_t index) : index(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    auto plain = gradients;
    if (is_dtensor(plain[index])) plain[index] = DTensor(plain[index]).full_tensor();
    return plain;
  }
  const int64_t index;  // of the tensor among its producer's results
};

void add_plain_gradient_hook(const at::Tensor& t) {
  if (!t.requires_grad() || !at::GradMode::is_enabled()) return;
  const auto& producer = t.grad_fn();
  const auto& hooks = producer ? producer->tensor_pre_hooks() : torch::autograd::impl::hooks(t);
  for (const auto& hook : hooks) {  // a leaf is used in every step, but needs the hook once
    const auto* ours = dynamic_cast<const PlainGradient*>(hook.get());
    if (ours && ours->index == t.output_nr()) return;
  }
  auto hook = std::make_unique<PlainGradient>(t.output_nr());
  if (producer)
    producer->add_tensor_pre_hook(std::move(hook));
  else
    torch::autograd::impl::add_hook(t, std::move(hook));
}

}  // namespace

PromotedArgs promote_plain_tensors(const OpEntry& entry, IValue* args) {
  const c10::ArrayRef<IValue> view(args, entry.num_args());
  bool has_plain = false;
  const TensorSpec* like = nullptr;
  for_each_tensor(entry, view, [&](const at::Tensor& t, int, int) {
    if (const auto* spec = spec_or_null(t))
      like = spec;
    else
      has_plain |= t.numel() != 1;
  });
  if (C10_LIKELY(!has_plain) || !like) return {};
  const bool backward = in_backward();
  bool may_read = backward || implicit_replication();
  for_each_tensor(entry, view, [&](const at::Tensor& t, int, int) { may_read |= is_dtensor(t) && accepts_plain(t); });
  const auto spec = SpecRef::reclaim_copy(like);  // `like` may be replaced below
  for_each_tensor(entry, view, [&](const at::Tensor& t, int arg, int element) {
    if (is_dtensor(t) || t.numel() == 1) return;
    const bool allowed = entry.is_written(arg) ? backward && element < 0 : may_read;
    TESSERA_CHECK(
        allowed, UsageError, entry.name, ": argument ", arg, " '", name_of(entry, arg), "'",
        element >= 0 ? c10::str(", element ", element, ",") : std::string(), " is a plain tensor of sizes ", t.sizes(),
        " next to distributed ones such as ", spec->describe(),
        ". Convert it with distribute_tensor or DTensor::from_local",
        entry.is_written(arg) ? "." : ", or open a scope ImplicitReplication to treat plain tensors as Replicate.");
    if (!backward) add_plain_gradient_hook(t);
  });
  PromotedArgs written;
  replace_tensors(entry, args, [&](const at::Tensor& t, int arg) {
    if (is_dtensor(t) || t.numel() == 1) return t;
    if (entry.is_written(arg)) written.emplace_back(static_cast<size_t>(arg), t);
    return as_replicated(t, *spec);
  });
  return written;
}

void convert_written(const PromotedArgs& written, IValue* args) {
  for (const auto& [arg, given] : written) {
    given.unsafeGetTensorImpl()->shallow_copy_from(args[arg].toTensor().getIntrusivePtr());
    args[arg] = given;
  }
}

}  // namespace tessera::detail
