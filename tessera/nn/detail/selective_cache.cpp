#include "tessera/nn/detail/selective_cache.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/detail/meta.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>

namespace tessera::detail {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

// The storage of a tensor; for a distributed tensor that of its local tensor.
const void* memory_of(const at::Tensor& t) {
  const auto& local = is_dtensor(t) ? local_of(t) : t;
  return local.has_storage() ? local.storage().unsafeGetStorageImpl() : nullptr;
}

template <class F>
void for_each_tensor_in(const IValue& v, F f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) f(v.toTensor());
  } else if (v.isTensorList()) {
    for (const at::Tensor& t : v.toTensorList())
      if (t.defined()) f(t);
  }
}

class FlagScope {
 public:
  explicit FlagScope(bool& flag) : flag_(flag) { flag_ = true; }
  ~FlagScope() { flag_ = false; }

 private:
  bool& flag_;
};

at::Tensor copy_of(const at::Tensor& t) {
  const OpModesOff off;
  const at::AutoDispatchBelowADInplaceOrView below;
  return t.clone();
}

c10::ArrayRef<IValue> top(const Stack& stack, size_t n) {
  return c10::ArrayRef<IValue>(stack.data() + (stack.size() - n), n);
}

}  // namespace

std::shared_ptr<SelectiveCache::Outputs> SelectiveCache::save(c10::ArrayRef<IValue> returns) {
  auto outputs = std::make_shared<Outputs>();
  for (const auto& v : returns) {
    if (v.isTensor() && v.toTensor().defined()) {
      outputs->tensors.emplace_back(v.toTensor());
      outputs->values.emplace_back(at::Tensor());
    } else if (v.isTensorList()) {
      const auto list = v.toTensorVector();
      for (const auto& t : list) outputs->tensors.emplace_back(t);
      outputs->list_sizes.push_back(list.size());
      outputs->values.emplace_back(c10::List<at::Tensor>());
    } else {
      outputs->values.push_back(v.isTensor() ? IValue() : v);
    }
  }
  return outputs;
}

// Pushes new tensor objects each time, because autograd makes them part of a graph.
void SelectiveCache::push(const Outputs& outputs, bool copies, Stack* stack) {
  size_t tensor = 0, list = 0;
  const auto next = [&] {
    const auto& t = outputs.tensors[tensor++].get();
    return copies ? copy_of(t) : t.tensor_data();
  };
  for (const auto& v : outputs.values) {
    if (v.isTensor()) {
      stack->emplace_back(next());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (size_t i = 0; i < outputs.list_sizes[list]; i++) tensors.push_back(next());
      list++;
      stack->emplace_back(std::move(tensors));
    } else {
      stack->push_back(v.isNone() ? IValue(at::Tensor()) : v);
    }
  }
}

void SelectiveCache::CachingMode::copy_before_write(const OperatorHandle& op, c10::ArrayRef<IValue> args) {
  if (by_memory_.empty() || !op.schema().is_mutable()) return;
  for (size_t i = 0; i < args.size(); i++) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    for_each_tensor_in(args[i], [&](const at::Tensor& t) {
      const auto found = by_memory_.find(memory_of(t));
      if (found == by_memory_.end()) return;
      auto& [outputs, index] = found->second;
      outputs->tensors[index] = VersionedTensor(copy_of(outputs->tensors[index].get()));
      outputs->copied = true;
      by_memory_.erase(found);
    });
  }
}

// An alias of saved memory with a version counter of its own (aten::_unsafe_view returns one) would hide a write after
// forward.
void SelectiveCache::CachingMode::share_versions(c10::ArrayRef<IValue> returns) const {
  if (by_memory_.empty()) return;
  for (const auto& v : returns) {
    for_each_tensor_in(v, [&](const at::Tensor& t) {
      const auto found = by_memory_.find(memory_of(t));
      if (found == by_memory_.end() || t.is_inference()) return;
      const auto& saved = found->second.first->tensors[found->second.second].get();
      t.unsafeGetTensorImpl()->set_version_counter(saved.unsafeGetTensorImpl()->version_counter());
    });
  }
}

void SelectiveCache::CachingMode::run(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (inside_) return next(op, keys, stack);
  const FlagScope inside(inside_);
  copy_before_write(op, top(*stack, op.schema().arguments().size()));
  const bool can_save = makes_tensors(op);
  const bool save_it = can_save && cache_.policy_(op);
  next(op, keys, stack);
  const auto returns = top(*stack, op.schema().returns().size());
  if (!can_save) return share_versions(returns);

  auto& calls = cache_.calls_[op];
  calls.outputs.push_back(save_it ? save(returns) : nullptr);
  if (!save_it) return share_versions(returns);
  calls.any_saved = true;
  const auto& outputs = calls.outputs.back();
  if (log_.complete()) outputs->log_position = log_.size();
  if (rng_ && op.hasTag(at::Tag::nondeterministic_seeded)) outputs->rng_after = rng_->now();
  for (size_t i = 0; i < outputs->tensors.size(); i++)
    if (const void* memory = memory_of(outputs->tensors[i].get())) by_memory_[memory] = {outputs, i};
}

void SelectiveCache::CachedMode::run(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (inside_) return next(op, keys, stack);
  const FlagScope inside(inside_);
  const auto found = cache_.calls_.find(op);
  if (found == cache_.calls_.end()) return next(op, keys, stack);
  auto& calls = found->second;
  const size_t call = calls_so_far_[op]++;
  const bool known = call < calls.outputs.size();
  const bool other_position = known && calls.outputs[call] && calls.outputs[call]->log_position && log_.complete() &&
                              *calls.outputs[call]->log_position != log_.size();
  TESSERA_CHECK((known || !calls.any_saved || !complete_) && !other_position, UsageError,
                "checkpoint: recomputation calls ", op.operator_name(), in_module(),
                ", whose outputs were saved, at a point where forward did not (call ", call, " of it; forward made ",
                calls.outputs.size(), "). The function must run the same ops in recomputation.");
  if (!known || !calls.outputs[call]) return next(op, keys, stack);
  const auto outputs = last_ ? std::move(calls.outputs[call]) : calls.outputs[call];
  torch::jit::drop(*stack, op.schema().arguments().size());
  push(*outputs, /*copies=*/outputs->copied && !last_, stack);
  if (outputs->rng_after) outputs->rng_after->restore();
}

}  // namespace tessera::detail
