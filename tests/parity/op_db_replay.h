#pragma once
#include "tessera/base/detail/json.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/testing/detail/op_call.h"

#include <torch/torch.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

// The programs that tests/parity/op_db.py dumped, and their execution op by op.
namespace tessera::parity {

using c10::IValue;
using c10::TypeKind;

struct OpDb {
  Json json;
  dcp::SafetensorsFile file;

  explicit OpDb(const std::string& folder)
      : json(Json::parse(read_text_file(folder + "/op_db.json", "the programs"), "op_db.json")),
        file(folder + "/op_db.safetensors") {}

  const Json& program(size_t number) const { return json.at("programs").items()[number]; }

  // A copy, or an undefined tensor.
  at::Tensor tensor(size_t program, char kind, size_t i) const {
    const auto name = c10::str(program, ".", kind, i);
    if (const auto* entry = file.find(name)) return file.tensor(*entry).clone();
    const auto* complex = file.find(name + "c");  // real and imaginary parts
    return complex ? at::view_as_complex(file.tensor(*complex).clone()) : at::Tensor();
  }

  // An input or a constant with its strides.
  at::Tensor input(size_t number, size_t i) const {
    auto t = tensor(number, 'i', i);
    if (const auto* strides = program(number).find("strides"))
      if (const auto* own = strides->find(c10::str("i", i)))
        t = at::empty_strided(t.sizes(), own->numbers(), t.options()).copy_(t);
    return t;
  }
};

inline IValue number_of(const Json& json) {
  if (const auto* b = json.get_if<bool>()) return *b;
  if (const auto* i = json.get_if<int64_t>()) return *i;
  if (const auto* d = json.get_if<double>()) return *d;
  if (const auto* special = json.find("float"))
    return special->text() == "nan" ? std::numeric_limits<double>::quiet_NaN()
                                    : (special->text()[0] == '-' ? -1 : 1) * std::numeric_limits<double>::infinity();
  if (const auto* complex = json.find("complex")) {
    const auto part = [&](size_t i) {
      const auto& item = complex->items()[i];
      const auto* d = item.get_if<double>();
      return d ? *d : static_cast<double>(item.number());
    };
    return c10::complex<double>(part(0), part(1));
  }
  return json.at("int").number();
}

inline double real_of(const Json& json) {
  const auto value = number_of(json);
  return value.isInt() ? static_cast<double>(value.toInt()) : value.isBool() ? value.toBool() : value.toDouble();
}

// Runs the nodes of a program. The values of its inputs and of its nodes are numbered in order.
class Replay {
 public:
  explicit Replay(std::vector<IValue> inputs) : values_(std::move(inputs)) {}

  void run(const Json& node) {
    const auto& op = node.at("op").text();
    if (op == "getitem") {
      const auto& items = node.at("args").items();
      const auto& list = values_[items[0].at("v").number()];
      const auto i = static_cast<size_t>(items[1].number());
      values_.push_back(list.isTuple() ? list.toTupleRef().elements()[i] : list.toListRef()[i]);
      return;
    }
    const auto handle = testing::find_op(op);
    auto stack = arguments(node, handle);
    handle.callBoxed(stack);
    add_results(stack);
  }

  // The arguments of a node. An argument that the node does not have gets its default.
  torch::jit::Stack arguments(const Json& node, const c10::OperatorHandle& op) const {
    torch::jit::Stack stack;
    for (const auto& argument : op.schema().arguments()) {
      const auto* given = node.at("args").find(argument.name());
      if (!given && argument.is_out()) continue;
      stack.push_back(given ? value_of(*given, argument.real_type()) : *argument.default_value());
    }
    return stack;
  }

  void add_results(const torch::jit::Stack& results) {
    if (results.size() == 1)
      values_.push_back(results[0]);
    else
      values_.emplace_back(c10::ivalue::Tuple::create(std::vector<IValue>(results.begin(), results.end())));
  }

  const IValue& value(int64_t id) const { return values_[static_cast<size_t>(id)]; }

 private:
  IValue value_of(const Json& json, const c10::TypePtr& type) const {
    if (const auto* id = json.find("v")) return values_[id->number()];
    if (json.get_if<std::nullptr_t>()) return {};
    if (const auto* device = json.find("device")) return c10::Device(device->text());
    if (const auto optional = type->cast<c10::OptionalType>()) return value_of(json, optional->getElementType());
    if (const auto list = type->cast<c10::ListType>()) return list_of(json, list->getElementType());
    switch (type->kind()) {
      case TypeKind::TensorType: {  // a number
        const auto value = number_of(json);
        auto scalar = at::scalar_to_tensor(value.toScalar());
        scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
        return scalar;
      }
      case TypeKind::FloatType:
        return real_of(json);
      case TypeKind::StringType:
        return json.text();
      default:
        if (const auto* text = json.get_if<std::string>()) return *text;
        return number_of(json);
    }
  }

  IValue list_of(const Json& json, const c10::TypePtr& element) const {
    const auto* items = json.get_if<Json::Array>();
    const Json::Array one = items ? *items : Json::Array{json};  // int[2] accepts one int
    if (element->kind() == TypeKind::TensorType) {
      c10::List<at::Tensor> list;
      for (const auto& item : one) list.push_back(value_of(item, element).toTensor());
      return list;
    }
    if (const auto optional = element->cast<c10::OptionalType>();
        optional && optional->getElementType()->kind() == TypeKind::TensorType) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& item : one) {
        const auto value = value_of(item, element);
        list.push_back(value.isTensor() ? std::optional(value.toTensor()) : std::nullopt);
      }
      return list;
    }
    if (element->kind() == TypeKind::BoolType) {
      c10::List<bool> list;
      for (const auto& item : one) list.push_back(number_of(item).toBool());
      return list;
    }
    if (element->kind() == TypeKind::FloatType) {
      c10::List<double> list;
      for (const auto& item : one) list.push_back(real_of(item));
      return list;
    }
    if (element->kind() == TypeKind::NumberType) {
      c10::impl::GenericList list(c10::NumberType::get());
      for (const auto& item : one) list.push_back(number_of(item));
      return list;
    }
    std::vector<int64_t> list;
    for (const auto& item : one) list.push_back(number_of(item).toInt());
    return list;
  }

  std::vector<IValue> values_;
};

}  // namespace tessera::parity
