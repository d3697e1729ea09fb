#include "tessera/compile/detail/trace/signature.h"

#include "tessera/compile/detail/trace/plain.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <sstream>

namespace tessera::compiler {
namespace {

void each_mode(const torch::nn::Module& module, std::vector<char>& modes) {
  modes.push_back(module.is_training());
  for (const auto& child : module.children()) each_mode(*child, modes);
}

}  // namespace

Signature signature_of(const Arguments& arguments) {
  Signature made;
  made.modes.push_back(at::GradMode::is_enabled());
  made.modes.push_back(at::autocast::is_autocast_enabled(at::kCPU));
  for (const auto* module : arguments.modules) {
    made.objects.push_back(module);
    each_mode(*module, made.modes);
  }
  for (const auto& leaf : arguments.leaves) made.objects.push_back(leaf.unsafeGetTensorImpl());
  for (const auto* optimizer : arguments.optimizers) {
    made.objects.push_back(optimizer);
    made.generations.push_back(optimizer->generation());
  }
  for (size_t i = 0; i < arguments.tensors.size(); i++) {
    const auto& t = arguments.tensors[i];
    Signature::Shape shape;
    if (!t.defined()) {
      made.tensors.push_back(shape);
      continue;
    }
    const auto& plain = plain_of(t);
    shape.type = Type::of(plain);
    if (is_dtensor(t)) shape.spec = tessera::detail::meta_of(t).spec;
    shape.requires_grad = t.requires_grad();
    for (size_t j = 0; j < i && shape.shares_with < 0; j++) {
      const auto& other = arguments.tensors[j];
      if (!other.defined()) continue;
      const auto& its = plain_of(other);
      if (its.storage().unsafeGetStorageImpl() != plain.storage().unsafeGetStorageImpl()) continue;
      shape.shares_with = static_cast<int>(j);
      shape.apart = plain.storage_offset() * static_cast<int64_t>(plain.itemsize()) -
                    its.storage_offset() * static_cast<int64_t>(its.itemsize());
    }
    made.tensors.push_back(std::move(shape));
  }
  made.numbers = arguments.numbers;
  made.words = arguments.words;
  return made;
}

std::string Signature::difference(const Signature& before) const {
  std::ostringstream out;
  if (objects != before.objects) return "another module or optimizer is given";
  if (generations != before.generations) return "the optimizer's state or options were exchanged";
  if (modes != before.modes) return "a module's training mode, autocast or gradient mode is another";
  if (tensors.size() != before.tensors.size()) return "the number of tensors is another";
  for (size_t i = 0; i < tensors.size(); i++) {
    if (tensors[i] == before.tensors[i]) continue;
    out << "argument " << i << " is " << tensors[i].type << ", it was " << before.tensors[i].type;
    if (tensors[i].type == before.tensors[i].type) out << ", laid out or requiring a gradient otherwise";
    return out.str();
  }
  for (size_t i = 0; i < numbers.size() && i < before.numbers.size(); i++)
    if (numbers[i] != before.numbers[i]) {
      out << "number " << i << " is " << numbers[i] << ", it was " << before.numbers[i];
      return out.str();
    }
  return "its arguments are others";
}

}  // namespace tessera::compiler
