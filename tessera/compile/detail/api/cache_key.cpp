#include "tessera/compile/detail/api/cache_key.h"

#include "tessera/compile/detail/trace/local_tensors.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

void append_training_modes(const torch::nn::Module& module, std::vector<char>& modes) {
  modes.push_back(module.is_training());
  for (const auto& child : module.children()) append_training_modes(*child, modes);
}

int64_t first_byte(const at::Tensor& t) { return t.storage_offset() * static_cast<int64_t>(t.itemsize()); }

CacheKey::TensorKey tensor_key(const Tensors& tensors, size_t i) {
  CacheKey::TensorKey key;
  const auto& t = tensors[i];
  if (!t.defined()) return key;
  const auto& local = local_or_self(t);
  key.type = Type::of(local);
  key.spec = spec_or_null(t);
  key.requires_grad = t.requires_grad();
  for (size_t j = 0; j < i && key.aliases < 0; j++) {
    if (!tensors[j].defined()) continue;
    const auto& earlier = local_or_self(tensors[j]);
    if (earlier.storage().unsafeGetStorageImpl() != local.storage().unsafeGetStorageImpl()) continue;
    key.aliases = static_cast<int>(j);
    key.alias_bytes = first_byte(local) - first_byte(earlier);
  }
  return key;
}

}  // namespace

CacheKey cache_key_of(const CallArguments& arguments) {
  CacheKey key;
  key.modes.push_back(at::GradMode::is_enabled());
  key.modes.push_back(at::autocast::is_autocast_enabled(at::kCPU));
  for (const auto* module : arguments.modules) {
    key.objects.push_back(module);
    append_training_modes(*module, key.modes);
  }
  for (const auto& leaf : arguments.leaves) key.objects.push_back(leaf.unsafeGetTensorImpl());
  for (const auto* optimizer : arguments.optimizers) {
    key.objects.push_back(optimizer);
    key.generations.push_back(optimizer->generation());
  }
  for (size_t i = 0; i < arguments.tensors.size(); i++) key.tensors.push_back(tensor_key(arguments.tensors, i));
  key.numbers = arguments.numbers;
  key.strings = arguments.strings;
  return key;
}

std::string CacheKey::difference(const CacheKey& before) const {
  if (objects != before.objects) return "a module or optimizer argument is another object";
  if (generations != before.generations) return "the optimizer's state or options were replaced";
  if (modes != before.modes) return "a module's training mode, autocast or the grad mode has changed";
  if (tensors.size() != before.tensors.size()) return "the number of tensor arguments has changed";
  for (size_t i = 0; i < tensors.size(); i++) {
    if (tensors[i] == before.tensors[i]) continue;
    return c10::str(
        "argument ", i, " is ", tensors[i].type, ", it was ", before.tensors[i].type,
        tensors[i].type == before.tensors[i].type ? ", with another placement, aliasing or requires_grad" : "");
  }
  for (size_t i = 0; i < numbers.size() && i < before.numbers.size(); i++)
    if (numbers[i] != before.numbers[i])
      return c10::str("number ", i, " is ", numbers[i], ", it was ", before.numbers[i]);
  return "its guards do not hold";
}

}  // namespace tessera::compiler
