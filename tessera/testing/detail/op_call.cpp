#include "tessera/testing/detail/op_call.h"

#include "tessera/base/error.h"
#include "tessera/rules/detail/hidden_writes.h"

#include <algorithm>

namespace tessera::testing {
namespace {

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

}  // namespace

c10::OperatorHandle find_op(const std::string& name) {
  auto dot = name.find('.');
  bool has_overload = dot != std::string::npos;
  auto op = c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), has_overload ? name.substr(dot + 1) : std::string()});
  TESSERA_CHECK(op, UsageError, "no op has the name '", name, "'; write namespace and overload: aten::add.Tensor");
  return *op;
}

OpCall::OpCall(const Sample& sample) : op_(find_op(sample.op)), args_(sample.args) {
  const auto& arguments = schema().arguments();
  for (size_t i = args_.size(); i < arguments.size(); i++) {
    TESSERA_CHECK(arguments[i].default_value(), UsageError, sample.op, ": the sample has ", sample.args.size(),
                  " arguments, and '", arguments[i].name(), "' has no default");
    args_.push_back(*arguments[i].default_value());
  }
  const auto* hidden = rules::hidden_writes(sample.op);
  for (int a = 0; a < static_cast<int>(args_.size()); a++) {
    bool written = is_written(arguments[a]) || (hidden && std::count(hidden->args.begin(), hidden->args.end(), a) > 0);
    auto& value = args_[a];
    auto add = [&](const at::Tensor& tensor, int element) {
      if (!tensor.defined()) return;
      slots_.push_back({a, element, written});
      tensors_.push_back(tensor);
    };
    if (value.isTensor()) {
      add(value.toTensor(), -1);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (int e = 0; e < static_cast<int>(list.size()); e++) add(list[e], e);
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorList();
      for (int e = 0; e < static_cast<int>(list.size()); e++)
        if (std::optional<at::Tensor> tensor = list.get(e)) add(*tensor, e);
    }
  }
}

rules::OpQuery OpCall::query(const std::vector<int>& plain_args) const {
  rules::OpQuery query{schema(), args_, {}};
  for (size_t i = 0; i < slots_.size(); i++) {
    bool plain = std::count(plain_args.begin(), plain_args.end(), slots_[i].arg) > 0;
    query.tensors.push_back({tensors_[i].sizes(), tensors_[i].strides(), tensors_[i].scalar_type(), slots_[i].arg,
                             slots_[i].element, !plain});
  }
  return query;
}

bool OpCall::has_kernel() const {
  const bool cuda = !tensors_.empty() && tensors_[0].is_cuda();
  return op_.hasComputedKernelForDispatchKey(cuda ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
}

std::vector<at::Tensor> OpCall::run(const std::vector<at::Tensor>& tensors, const std::string& name,
                                    const std::vector<c10::IValue>& more) const {
  torch::jit::Stack stack(args_.begin(), args_.end());
  for (size_t i = 0; i < slots_.size(); i++) {
    auto& value = stack[slots_[i].arg];
    if (slots_[i].element < 0) {
      value = tensors[i];
      continue;
    }
    bool first_of_list = i == 0 || slots_[i - 1].arg != slots_[i].arg;
    if (value.isTensorList()) {
      if (first_of_list) value = value.toTensorList().copy();  // the sample's list must not change
      value.toTensorList().set(slots_[i].element, tensors[i]);
    } else {
      if (first_of_list) value = value.toOptionalTensorList().copy();
      value.toOptionalTensorList().set(slots_[i].element, tensors[i]);
    }
  }
  stack.insert(stack.end(), more.begin(), more.end());
  auto op = name.empty() ? op_ : find_op(name);
  op.callBoxed(stack);

  std::vector<at::Tensor> outputs;
  const auto& returns = schema().returns();
  for (size_t r = 0; r < stack.size(); r++) {
    if (r < returns.size() && is_written(returns[r])) continue;
    if (stack[r].isTensor())
      outputs.push_back(stack[r].toTensor());
    else if (stack[r].isNone())
      outputs.emplace_back();
    else if (stack[r].isTensorList())
      for (const at::Tensor& t : stack[r].toTensorVector()) outputs.push_back(t);
  }
  return outputs;
}

}  // namespace tessera::testing
