#pragma once
#include "tessera/propagate/detail/key.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <utility>
#include <vector>

// The boxed arguments of an op: visit the tensors, read the decision key, promote plain tensors.
namespace tessera::detail {

// Calls f(tensor, arg, element) for every defined tensor among the arguments.
template <class F>
void for_each_tensor(const propagate::OpEntry& entry, c10::ArrayRef<c10::IValue> args, F f) {
  for (size_t i = 0; i < entry.num_args(); i++) {
    const int arg = static_cast<int>(i);
    switch (entry.kinds[i]) {
      case propagate::ArgKind::Tensor:
        if (args[i].isTensor() && args[i].toTensor().defined()) f(args[i].toTensor(), arg, -1);
        break;
      case propagate::ArgKind::TensorList:
      case propagate::ArgKind::OptionalTensorList: {
        if (!args[i].isList()) break;  // None
        int element = 0;
        for (const auto& v : args[i].toListRef()) {
          if (v.isTensor() && v.toTensor().defined()) f(v.toTensor(), arg, element);
          element++;
        }
        break;
      }
      case propagate::ArgKind::Scalar:
      case propagate::ArgKind::ScalarList:
      case propagate::ArgKind::Other:
        break;
    }
  }
}

// Replaces every defined tensor among the arguments by f(tensor, arg), in the order of for_each_tensor.
template <class F>
void replace_tensors(const propagate::OpEntry& entry, c10::IValue* args, F f) {
  for (size_t i = 0; i < entry.num_args(); i++) {
    auto& v = args[i];
    const int arg = static_cast<int>(i);
    switch (entry.kinds[i]) {
      case propagate::ArgKind::Tensor:
        if (v.isTensor() && v.toTensor().defined()) v = c10::IValue(f(v.toTensor(), arg));
        break;
      case propagate::ArgKind::TensorList: {
        if (!v.isList()) break;
        c10::List<at::Tensor> list;
        const auto old = v.toListRef();
        list.reserve(old.size());
        for (const auto& x : old) list.push_back(x.toTensor().defined() ? f(x.toTensor(), arg) : at::Tensor());
        v = std::move(list);
        break;
      }
      case propagate::ArgKind::OptionalTensorList: {
        if (!v.isList()) break;
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& x : v.toListRef())
          list.push_back(x.isTensor() && x.toTensor().defined() ? std::optional(f(x.toTensor(), arg)) : std::nullopt);
        v = std::move(list);
        break;
      }
      case propagate::ArgKind::Scalar:
      case propagate::ArgKind::ScalarList:
      case propagate::ArgKind::Other:
        break;
    }
  }
}

const std::string& name_of(const propagate::OpEntry& entry, int arg);

// Appends to `key` the words that Reader makes of the same arguments in a typed kernel.
void read_boxed(const propagate::OpEntry& entry, c10::ArrayRef<c10::IValue> args, propagate::Key& key);

// Plain tensors that the op writes: the argument's index and the caller's tensor.
using PromotedArgs = std::vector<std::pair<size_t, at::Tensor>>;

// Replaces plain tensors of more than one element by replicated DTensors around the same memory. Allowed
//   - inside an ImplicitReplication scope,
//   - next to a parameter with DTensorMeta::accepts_plain,
//   - in backward, where autograd formulas create tensors of global size with the same values on every rank.
// Otherwise throws UsageError. The caller's tensors stay plain and get plain gradients. In backward a plain tensor may
// also be written; it is returned, and convert_written() makes a DTensor of it.
PromotedArgs promote_plain_tensors(const propagate::OpEntry& entry, c10::IValue* args);

// Makes DTensors of the caller's plain tensors that the op writes. Called after choose() accepted the call.
void convert_written(const PromotedArgs& written, c10::IValue* args);

}  // namespace tessera::detail
