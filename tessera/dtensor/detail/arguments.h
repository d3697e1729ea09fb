#pragma once
#include "tessera/propagate/detail/key.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <utility>
#include <vector>

// The boxed arguments of a call: walked, keyed, and made fit.
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

const std::string& name_of(const propagate::OpEntry& entry, int arg);

// The same words that Reader makes of typed arguments.
void read_boxed(const propagate::OpEntry& entry, c10::ArrayRef<c10::IValue> args, propagate::Key& key);

// A plain tensor of more than one element next to distributed ones is refused (UsageError), with three exceptions:
// inside ImplicitReplication, next to a parameter that takes plain inputs, and in backward, where autograd's own
// formulas build tensors of global size, the same on every rank. For the call those count as Replicate; the caller's
// tensors stay what they are, and get a plain gradient. Only a tensor that such a formula writes to becomes distributed
// itself, once the call is known to be possible: convert_written().
class PromotedPlain {
 public:
  PromotedPlain(const propagate::OpEntry& entry, c10::IValue* args);
  void convert_written();

 private:
  c10::IValue* args_;
  std::vector<std::pair<size_t, at::Tensor>> written_;  // argument, and the plain tensor that was there
};

}  // namespace tessera::detail
