#include "tessera/state/state_dict.h"

#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/state/detail/module_slots.h"

#include <torch/nn/module.h>

#include <mutex>
#include <ostream>

namespace tessera {

StateDict::StateDict(std::initializer_list<Item> items) {
  for (const auto& [name, tensor] : items) insert(name, tensor);
}

void StateDict::insert(std::string name, at::Tensor tensor) {
  TESSERA_CHECK(tensor.defined(), UsageError, "state dict: the tensor for '", name, "' is undefined");
  const bool is_new = index_.emplace(name, items_.size()).second;
  TESSERA_CHECK(is_new, UsageError, "state dict: '", name, "' exists already; erase it first to replace it");
  items_.emplace_back(std::move(name), std::move(tensor));
}

void StateDict::insert_all(const std::string& prefix, const StateDict& other) {
  for (const auto& [name, tensor] : other)
    TESSERA_CHECK(!contains(prefix + name), UsageError, "state dict: '", prefix, name, "' exists already");
  for (const auto& [name, tensor] : other) insert(prefix + name, tensor);
}

bool StateDict::erase(const std::string& name) {
  const auto found = index_.find(name);
  if (found == index_.end()) return false;
  const size_t at = found->second;
  items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(at));
  index_.erase(found);
  for (auto& [other, position] : index_)
    if (position > at) position--;
  return true;
}

const at::Tensor* StateDict::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &items_[found->second].second;
}

const at::Tensor& StateDict::at(const std::string& name) const {
  if (const at::Tensor* tensor = find(name)) return *tensor;
  const auto near = did_you_mean(name, names());
  TESSERA_FAIL(UsageError, "state dict: there is no '", name, "' among ", size(), " names", near.empty() ? "" : "; ",
               near);
}

StateDict StateDict::under(const std::string& prefix) const {
  StateDict part;
  for (const auto& [name, tensor] : items_)
    if (name.starts_with(prefix)) part.insert(name.substr(prefix.size()), tensor);
  return part;
}

std::vector<std::string> StateDict::names() const {
  std::vector<std::string> names;
  names.reserve(size());
  for (const auto& [name, tensor] : items_) names.push_back(name);
  return names;
}

std::ostream& operator<<(std::ostream& out, const StateDict& dict) {
  for (const auto& [name, tensor] : dict) {
    out << name << "  " << c10::toString(tensor.scalar_type()) << tensor.sizes();
    if (is_dtensor(tensor))
      out << ' ' << to_string(DTensor(tensor).placements()) << " on mesh(" << DTensor(tensor).device_mesh() << ')';
    out << '\n';
  }
  return out;
}

namespace detail {
namespace {

void collect(const torch::nn::Module& module, const std::string& prefix, std::vector<ModuleSlot>& slots) {
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    slots.push_back({prefix + item.key(), item.value(), &module});
  for (const auto& item : module.named_buffers(/*recurse=*/false))
    slots.push_back({prefix + item.key(), item.value(), &module});
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", slots);
}

struct Preparations {
  std::mutex mutex;
  std::vector<std::function<void(const torch::nn::Module&)>> all;
};
Preparations& preparations() {
  static auto* it = new Preparations;
  return *it;
}

}  // namespace

void before_slots(std::function<void(const torch::nn::Module&)> prepare) {
  const std::lock_guard lock(preparations().mutex);
  preparations().all.push_back(std::move(prepare));
}

std::vector<ModuleSlot> slots_of(const torch::nn::Module& module) {
  auto& [mutex, all] = preparations();
  std::unique_lock lock(mutex);
  const auto now = all;
  lock.unlock();
  for (const auto& prepare : now) prepare(module);
  std::vector<ModuleSlot> slots;
  collect(module, "", slots);
  std::erase_if(slots, [](const ModuleSlot& slot) { return !slot.tensor.defined(); });
  return slots;
}

}  // namespace detail

StateDict state_dict(const torch::nn::Module& module) {
  StateDict dict;
  for (auto& slot : detail::slots_of(module)) dict.insert(std::move(slot.name), slot.tensor.detach());
  return dict;
}

}  // namespace tessera
