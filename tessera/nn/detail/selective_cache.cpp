#include "tessera/nn/detail/selective_cache.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/module_name.h"
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

// Where the elements lie: of a distributed tensor, those of this rank.
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

class Inside {
 public:
  explicit Inside(bool& flag) : flag_(flag) { flag_ = true; }
  ~Inside() { flag_ = false; }

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

std::shared_ptr<SelectiveCache::Result> SelectiveCache::take(c10::ArrayRef<IValue> returns) {
  auto result = std::make_shared<Result>();
  for (const auto& v : returns) {
    if (v.isTensor() && v.toTensor().defined()) {
      result->tensors.emplace_back(v.toTensor());
      result->values.emplace_back(at::Tensor());
    } else if (v.isTensorList()) {
      const auto list = v.toTensorVector();
      for (const auto& t : list) result->tensors.emplace_back(t);
      result->list_sizes.push_back(list.size());
      result->values.emplace_back(c10::List<at::Tensor>());
    } else {
      result->values.push_back(v.isTensor() ? IValue() : v);
    }
  }
  return result;
}

// Fresh tensors each time: autograd will make those it is given part of a graph.
void SelectiveCache::give(const Result& result, bool copies, Stack* stack) {
  size_t tensor = 0, list = 0;
  const auto next = [&] {
    const auto& t = result.tensors[tensor++].get();
    return copies ? copy_of(t) : t.tensor_data();
  };
  for (const auto& v : result.values) {
    if (v.isTensor()) {
      stack->emplace_back(next());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (size_t i = 0; i < result.list_sizes[list]; i++) tensors.push_back(next());
      list++;
      stack->emplace_back(std::move(tensors));
    } else {
      stack->push_back(v.isNone() ? IValue(at::Tensor()) : v);
    }
  }
}

void SelectiveCache::CachingMode::copy_what_is_written(const OperatorHandle& op, c10::ArrayRef<IValue> args) {
  if (by_memory_.empty() || !op.schema().is_mutable()) return;
  for (size_t i = 0; i < args.size(); i++) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    for_each_tensor_in(args[i], [&](const at::Tensor& t) {
      const auto found = by_memory_.find(memory_of(t));
      if (found == by_memory_.end()) return;
      auto& [result, index] = found->second;
      result->tensors[index] = VersionedTensor(copy_of(result->tensors[index].get()));
      result->copied = true;
      by_memory_.erase(found);
    });
  }
}

// An alias of kept memory that counts its versions alone (aten::_unsafe_view makes one) would let a write after
// forward go unseen.
void SelectiveCache::CachingMode::share_versions(c10::ArrayRef<IValue> returns) const {
  if (by_memory_.empty()) return;
  for (const auto& v : returns) {
    for_each_tensor_in(v, [&](const at::Tensor& t) {
      const auto found = by_memory_.find(memory_of(t));
      if (found == by_memory_.end() || t.is_inference()) return;
      const auto& kept = found->second.first->tensors[found->second.second].get();
      t.unsafeGetTensorImpl()->set_version_counter(kept.unsafeGetTensorImpl()->version_counter());
    });
  }
}

void SelectiveCache::CachingMode::run(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (inside_) return next(op, keys, stack);
  const Inside inside(inside_);
  copy_what_is_written(op, top(*stack, op.schema().arguments().size()));
  const bool asked = makes_tensors(op);
  const bool keep = asked && kept_.policy_(op);
  next(op, keys, stack);
  const auto returns = top(*stack, op.schema().returns().size());
  if (!asked) return share_versions(returns);

  auto& calls = kept_.calls_[op];
  calls.results.push_back(keep ? take(returns) : nullptr);
  if (!keep) return share_versions(returns);
  calls.any_kept = true;
  const auto& result = calls.results.back();
  if (op_log_.complete()) result->step = op_log_.steps();
  if (streams_ && op.hasTag(at::Tag::nondeterministic_seeded)) result->after = streams_->again();
  for (size_t i = 0; i < result->tensors.size(); i++)
    if (const void* memory = memory_of(result->tensors[i].get())) by_memory_[memory] = {result, i};
}

void SelectiveCache::CachedMode::run(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (inside_) return next(op, keys, stack);
  const Inside inside(inside_);
  const auto found = kept_.calls_.find(op);
  if (found == kept_.calls_.end()) return next(op, keys, stack);
  auto& calls = found->second;
  const size_t call = calls_so_far_[op]++;
  const bool known = call < calls.results.size();
  const bool out_of_step = known && calls.results[call] && calls.results[call]->step && op_log_.complete() &&
                           *calls.results[call]->step != op_log_.steps();
  TESSERA_CHECK((known || !calls.any_kept || !complete_) && !out_of_step, UsageError,
                "checkpoint: recomputation calls ", op.operator_name(), in_module(),
                ", whose results were kept, at a point where forward did not (call ", call, " of it; forward made ",
                calls.results.size(), "). The function must do the same when it is run again.");
  if (!known || !calls.results[call]) return next(op, keys, stack);
  const auto result = last_ ? std::move(calls.results[call]) : calls.results[call];
  torch::jit::drop(*stack, op.schema().arguments().size());
  give(*result, /*copies=*/result->copied && !last_, stack);
  if (result->after) result->after->restore();
}

}  // namespace tessera::detail
