#pragma once
#include "tessera/rules/detail/hidden_writes.h"
#include "tessera/rules/detail/rule.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <string>

namespace tessera::propagate {

enum class ArgKind : uint8_t { Tensor, TensorList, OptionalTensorList, Scalar, ScalarList, Other };

// What dispatch needs from an op's schema, read once. It is bound to the op's kernel, so a call does not look up the op
// by name.
struct OpEntry {
  c10::OperatorHandle op;
  size_t id;         // index into a mesh's decision tables
  std::string name;  // "aten::add.Tensor"
  c10::SmallVector<ArgKind, 8> kinds;
  c10::SmallVector<int, 4> writes;        // arguments that the schema marks as written
  c10::SmallVector<int8_t, 4> return_of;  // per return: its index in `writes`, or -1 for a new value
  bool view = false;                      // the result aliases the first argument
  // We bump the versions of list elements, because no ADInplaceOrView kernel does.
  bool writes_list = false;
  bool random = false;                          // draws random numbers
  bool inplace_view = false;                    // t_, squeeze_: changes the sizes and strides of its argument
  bool may_copy = false;                        // a view by its schema, but its callers need only the values (reshape)
  const rules::HiddenWrites* hidden = nullptr;  // writes that the schema does not declare; may be null

  OpEntry(c10::OperatorHandle op, size_t id, std::string name) : op(op), id(id), name(std::move(name)) {}
  size_t num_args() const { return kinds.size(); }
  size_t num_returns() const { return return_of.size(); }
  bool is_written(int arg) const;
  bool is_written_hidden(int arg, c10::ArrayRef<c10::IValue> args) const;  // in this call, by OpEntry::hidden
  // The present rule, or null. It is looked up again after a registration. Thread ranks share entries.
  const rules::OpRule* rule() const;

 private:
  struct CachedRule {
    uint64_t version;
    const rules::OpRule* rule;
  };
  mutable std::atomic<const CachedRule*> cached_ = nullptr;  // old ones are kept; there is one per registration
};

// The entry of an op. It is made on first use and never freed. Thread-safe; too slow for the hot path.
OpEntry& entry_of(const c10::OperatorHandle& op);
OpEntry& entry_of(std::string_view name);  // "aten::add.Tensor"; throws InternalError for an unknown op
size_t entry_count();

}  // namespace tessera::propagate
