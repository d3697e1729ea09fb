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
  if (v.isDevice())
    return reader.key.push(static_cast<uint64_t>(v.toDevice().type()) << 8 |
                           static_cast<uint8_t>(v.toDevice().index()));
  if (v.isComplexDouble()) return reader.key.push(3);
  if (v.isGenerator()) return reader.key.push(4);
  if (v.isTensor()) return reader.read(v.toTensor());
  TESSERA_FAIL(InternalError, entry.name, ": no way to key an argument of kind ", v.tagKind());
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
      case ArgKind::ScalarList: {  // a list of learning rates changes like one: by type
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

at::Tensor as_replicate(const at::Tensor& t, const TensorSpec& like) {
  at::AutoDispatchBelowADInplaceOrView below;
  const Placements whole(like.placements.size(), Replicate());
  auto spec = intern(like.mesh, whole, t.sizes(), t.strides(), t.scalar_type(), t.device());
  return wrap(at::alias(t), std::move(spec));
}

// Is it, or is it a view of, a parameter that takes plain inputs? Linear multiplies by weight.t().
bool takes_plain(const at::Tensor& t) {
  if (meta_of(t).takes_plain) return true;
  if (!t.is_view()) return false;
  const at::Tensor base(t._base());
  return is_dtensor(base) && meta_of(base).takes_plain;
}

// What reaches a plain tensor in backward must be plain: its producer knows nothing of distributed ones.
struct PlainGradient final : torch::autograd::FunctionPreHook {
  explicit PlainGradient(int64_t index) : index(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    auto plain = gradients;
    if (is_dtensor(plain[index])) plain[index] = DTensor(plain[index]).full_tensor();
    return plain;
  }
  const int64_t index;  // of the tensor among its producer's results
};

void expect_plain_gradient(const at::Tensor& t) {
  if (!t.requires_grad() || !at::GradMode::is_enabled()) return;
  const auto& producer = t.grad_fn();
  const auto& hooks = producer ? producer->tensor_pre_hooks() : torch::autograd::impl::hooks(t);
  for (const auto& hook : hooks) {  // a leaf is used in every step
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

PromotedPlain::PromotedPlain(const OpEntry& entry, IValue* args) : args_(args) {
  const c10::ArrayRef<IValue> view(args, entry.num_args());
  bool found = false;
  const TensorSpec* like = nullptr;
  for_each_tensor(entry, view, [&](const at::Tensor& t, int, int) {
    if (const auto* spec = spec_or_null(t))
      like = spec;
    else
      found |= t.numel() != 1;
  });
  if (C10_LIKELY(!found) || !like) return;
  const bool in_formula = in_backward();
  bool in_scope = implicit_replication();
  for_each_tensor(entry, view, [&](const at::Tensor& t, int, int) { in_scope |= is_dtensor(t) && takes_plain(t); });
  const auto spec = SpecRef::reclaim_copy(like);  // `like` may be replaced below
  for_each_tensor(entry, view, [&](const at::Tensor& t, int arg, int element) {
    if (is_dtensor(t) || t.numel() == 1) return;
    const bool allowed = entry.is_written(arg) ? in_formula && element < 0 : in_formula || in_scope;
    TESSERA_CHECK(
        allowed, UsageError, entry.name, ": argument ", arg, " '", name_of(entry, arg), "'",
        element >= 0 ? c10::str(", element ", element, ",") : std::string(), " is a plain tensor of sizes ", t.sizes(),
        " next to distributed ones such as ", spec->describe(),
        ". Make it one with distribute_tensor or DTensor::from_local",
        entry.is_written(arg) ? "." : ", or open a scope ImplicitReplication to take plain tensors as Replicate.");
    if (!in_formula) expect_plain_gradient(t);
  });
  for (size_t i = 0; i < entry.num_args(); i++) {
    auto& v = args[i];
    auto promoted = [&](const at::Tensor& t) {
      return t.defined() && !is_dtensor(t) && t.numel() != 1 ? as_replicate(t, *spec) : t;
    };
    if (entry.kinds[i] == ArgKind::Tensor && v.isTensor() && v.toTensor().defined()) {
      const at::Tensor given = v.toTensor();
      v = promoted(given);
      if (entry.is_written(static_cast<int>(i)) && !given.is_same(v.toTensor())) written_.emplace_back(i, given);
    } else if (entry.kinds[i] == ArgKind::TensorList && v.isList()) {
      c10::List<at::Tensor> list;
      for (const auto& x : v.toListRef()) list.push_back(promoted(x.toTensor()));
      v = std::move(list);
    } else if (entry.kinds[i] == ArgKind::OptionalTensorList && v.isList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& x : v.toListRef())
        list.push_back(x.isTensor() ? std::optional(promoted(x.toTensor())) : std::nullopt);
      v = std::move(list);
    }
  }
}

void PromotedPlain::convert_written() {
  for (auto& [arg, given] : written_) {
    given.unsafeGetTensorImpl()->shallow_copy_from(args_[arg].toTensor().getIntrusivePtr());
    args_[arg] = given;
  }
}

}  // namespace tessera::detail
