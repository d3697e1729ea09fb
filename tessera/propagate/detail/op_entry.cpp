#include "tessera/propagate/detail/op_entry.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace tessera::propagate {
namespace {

struct Entries {
  std::mutex mutex;
  std::deque<OpEntry> all;  // a deque, so that addresses stay valid
  std::unordered_map<std::string, OpEntry*> by_name;
};
Entries& entries() {
  static auto* e = new Entries;  // never destroyed: kernels refer to it until the process ends
  return *e;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

ArgKind kind_of(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (type->kind() == c10::TypeKind::TensorType) return ArgKind::Tensor;
  if (type->kind() == c10::TypeKind::NumberType) return ArgKind::Scalar;
  if (auto list = type->cast<c10::ListType>()) {
    auto element = list->getElementType();
    if (element->kind() == c10::TypeKind::TensorType) return ArgKind::TensorList;
    if (element->kind() == c10::TypeKind::NumberType) return ArgKind::ScalarList;
    if (auto optional = element->cast<c10::OptionalType>())
      if (optional->getElementType()->kind() == c10::TypeKind::TensorType) return ArgKind::OptionalTensorList;
  }
  return ArgKind::Other;
}

void read_schema(OpEntry& entry, const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto& argument = schema.arguments()[i];
    entry.kinds.push_back(kind_of(argument.type()));
    if (argument.alias_info() && argument.alias_info()->isWrite()) {
      entry.writes.push_back(static_cast<int>(i));
      entry.writes_list |= entry.kinds.back() == ArgKind::TensorList;
    }
  }
  int8_t next_written = 0;
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    const bool written = alias && alias->isWrite() && next_written < static_cast<int8_t>(entry.writes.size());
    entry.return_of.push_back(written ? next_written++ : int8_t{-1});
    entry.view |= alias && !alias->isWrite();
  }
}

}  // namespace

bool OpEntry::is_written(int arg) const { return std::find(writes.begin(), writes.end(), arg) != writes.end(); }

bool OpEntry::is_written_hidden(int arg, c10::ArrayRef<c10::IValue> call) const {
  if (!hidden || std::find(hidden->args.begin(), hidden->args.end(), arg) == hidden->args.end()) return false;
  return hidden->only_if < 0 || call[static_cast<size_t>(hidden->only_if)].toBool();
}

const rules::OpRule* OpEntry::rule() const {
  const auto& registry = rules::registry();
  const auto version = registry.version();
  const auto* cached = cached_.load(std::memory_order_acquire);
  if (C10_UNLIKELY(!cached || cached->version != version)) {
    cached = new CachedRule{version, registry.find(name)};
    cached_.store(cached, std::memory_order_release);
  }
  return cached->rule;
}

OpEntry& entry_of(const c10::OperatorHandle& op) {
  auto& e = entries();
  auto name = full_name(op.operator_name());
  std::lock_guard lock(e.mutex);
  if (auto found = e.by_name.find(name); found != e.by_name.end()) return *found->second;
  e.all.emplace_back(op, e.all.size(), name);
  auto& entry = e.all.back();
  read_schema(entry, op.schema());
  entry.hidden = rules::hidden_writes(name);
  entry.random = op.hasTag(at::Tag::nondeterministic_seeded);
  entry.inplace_view = op.hasTag(at::Tag::inplace_view);
  entry.may_copy = name == "aten::_reshape_alias" || name == "aten::_unsafe_view";
  e.by_name.emplace(name, &entry);
  return entry;
}

OpEntry& entry_of(std::string_view name) {
  const auto dot = name.find('.');
  const auto base = std::string(name.substr(0, dot));
  const auto overload = dot == std::string_view::npos ? std::string() : std::string(name.substr(dot + 1));
  auto op = c10::Dispatcher::singleton().findSchema({base, overload});
  TESSERA_CHECK(op.has_value(), InternalError, "unknown op ", name);
  return entry_of(*op);
}

size_t entry_count() {
  auto& e = entries();
  std::lock_guard lock(e.mutex);
  return e.all.size();
}

}  // namespace tessera::propagate
