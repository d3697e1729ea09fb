#include "tessera/compile/detail/trace/call_arguments.h"

#include "tessera/base/error.h"
#include "tessera/optim/detail/substitute_optimizer.h"

#include <c10/util/Type.h>

#include <unordered_map>

namespace tessera::compiler {

const char* text_of(ArgumentLeaf::Kind kind) {
  using Kind = ArgumentLeaf::Kind;
  switch (kind) {
    case Kind::Number:
      return "the number";
    case Kind::Integer:
      return "an integer, bool or enum";
    case Kind::Text:
      return "a string";
    case Kind::Length:
      return "a length or number of elements";
    case Kind::Present:
      return "an optional";
    case Kind::Options:
      return "a dtype, device or kind of number";
    case Kind::Complex:
      return "a number";
    case Kind::Generator:
      return "a generator";
    case Kind::Tensors:
      return "the number of tensors";
    case Kind::Class:
      return "the type";
  }
  TESSERA_FAIL(InternalError, "compile: unknown kind of leaf");
}

OptimizerAccess* CallArguments::own_optimizer(torch::optim::Optimizer& optimizer) {
  if (auto* own = dynamic_cast<OptimizerAccess*>(&optimizer)) return own;
  auto* substitute = dynamic_cast<optim::detail::SubstituteOptimizer*>(&optimizer);
  TESSERA_CHECK(substitute, InternalError, "compile: a torch::optim::Optimizer without a substitute");
  return &substitute->own();
}

void CallArguments::refuse_missing_members(const std::type_info& type, size_t listed, size_t members) {
  TESSERA_FAIL(UsageError, "compile: tessera_visit of ", c10::demangle(type.name()), " lists ", listed, " of its ",
               members,
               " members. A member that is not listed could change between calls without being seen; list all of them");
}

void CallArguments::refuse_derived_class(const std::type_info& type, const std::type_info& base) {
  TESSERA_FAIL(UsageError, "compile: an argument of type ", c10::demangle(base.name()), " is an object of the class ",
               c10::demangle(type.name()),
               ", which is derived from it. Members and functions of a derived class could ",
               "change between calls without being seen; pass it by its own type");
}

void CallArguments::scalar(const c10::Scalar& value) {
  if (value.isFloatingPoint()) return number(value.toDouble());
  if (value.isComplex()) {
    const auto complex = value.toComplexDouble();
    return leaf(Kind::Complex, static_cast<int64_t>(hash_bytes(&complex, sizeof(complex))));
  }
  leaf(Kind::Options, value.isBoolean());
  leaf(Kind::Integer, value.isBoolean() ? value.toBool() : value.toLong());
}

void CallArguments::options(const c10::TensorOptions& value) {
  const auto bits = [](bool given, int64_t what) { return given ? what + 1 : 0; };
  leaf(Kind::Options, bits(value.has_dtype(), static_cast<int64_t>(c10::typeMetaToScalarType(value.dtype()))));
  leaf(Kind::Options,
       bits(value.has_device(), static_cast<int64_t>(value.device().type()) * 1024 + value.device().index()));
  leaf(Kind::Options, bits(value.has_layout(), static_cast<int64_t>(value.layout())));
  leaf(Kind::Options, bits(value.has_requires_grad(), value.requires_grad()));
  leaf(Kind::Options, bits(value.has_pinned_memory(), value.pinned_memory()));
  leaf(Kind::Options, value.has_memory_format() ? static_cast<int64_t>(*value.memory_format_opt()) + 1 : 0);
}

void CallArguments::generator(const at::Generator& value) {
  leaf(Kind::Generator,
       static_cast<int64_t>(reinterpret_cast<intptr_t>(value.defined() ? value.unsafeGetGeneratorImpl() : nullptr)));
}

std::vector<Lifted> lift(const CallArguments& arguments) {
  std::vector<Lifted> lifted;
  std::unordered_map<const void*, std::string> names;  // of the tensors lifted so far
  const auto add = [&](const at::Tensor& t, Role role, const std::string& name) {
    if (t.defined() && names.emplace(t.unsafeGetTensorImpl(), name).second) lifted.push_back({t, role, name});
  };
  for (size_t m = 0; m < arguments.modules.size(); m++) {
    const auto prefix = arguments.modules.size() == 1 ? "" : c10::str(m, ".");
    for (const auto& item : arguments.modules[m]->named_parameters())
      add(item.value(), Role::Parameter, prefix + item.key());
    for (const auto& item : arguments.modules[m]->named_buffers()) add(item.value(), Role::Buffer, prefix + item.key());
  }
  for (const auto& leaf : arguments.leaves) add(leaf, Role::Parameter, c10::str("leaf ", names.size()));
  std::vector<at::Tensor> parameters;
  for (auto* optimizer : arguments.optimizers)
    for (const auto& group : optimizer->groups())
      for (const auto& p : group) add(p, Role::Parameter, c10::str("parameter ", names.size()));
  for (const auto& each : lifted)
    if (each.role == Role::Parameter) parameters.push_back(each.tensor);
  for (auto* optimizer : arguments.optimizers)
    for (const auto& group : optimizer->groups())
      for (const auto& p : group)
        for (const auto& [key, value] : optimizer->state(p))
          add(value, Role::State, names[p.unsafeGetTensorImpl()] + "." + key);
  for (const auto& p : parameters)
    if (p.grad().defined()) add(p.grad(), Role::Gradient, names[p.unsafeGetTensorImpl()]);
  for (size_t i = 0; i < arguments.tensors.size(); i++)
    if (!arguments.tensors[i].defined() || !names.count(arguments.tensors[i].unsafeGetTensorImpl()))
      lifted.push_back({arguments.tensors[i], Role::Argument, std::to_string(i)});
  return lifted;
}

}  // namespace tessera::compiler
