#pragma once
#include "tessera/rules/detail/rule.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <string>

namespace tessera::propagate {

enum class ArgKind : uint8_t { Tensor, TensorList, OptionalTensorList, Scalar, ScalarList, Other };

// What dispatch needs to know of an op, read from its schema once. Bound into the op's kernel, so that a call never
// looks an op up by name.
struct OpEntry {
  c10::OperatorHandle op;
  size_t id;         // index into a mesh's decision tables
  std::string name;  // "aten::add.Tensor"
  c10::SmallVector<ArgKind, 8> kinds;
  c10::SmallVector<int, 4> writes;        // arguments the schema says are written
  c10::SmallVector<int8_t, 4> return_of;  // per return: which entry of `writes` it is, or -1 for a fresh value
  bool view = false;                      // the result aliases the first argument
  bool writes_list = false;               // no ADInplaceOrView kernel bumps the versions of list elements: we do
  bool random = false;                    // draws numbers: equal inputs do not mean equal results
  bool inplace_view = false;              // t_, squeeze_: changes the geometry of what it is called on
  bool may_copy = false;                  // a view by schema, but its callers only want the values (reshape)

  OpEntry(c10::OperatorHandle op, size_t id, std::string name) : op(op), id(id), name(std::move(name)) {}
  size_t num_args() const { return kinds.size(); }
  size_t num_returns() const { return return_of.size(); }
  bool is_written(int arg) const;
  // The rule as it stands; looked up again when rules were registered since. Entries are shared by thread ranks.
  const rules::OpRule* rule() const;

 private:
  struct Known {
    uint64_t version;
    const rules::OpRule* rule;
  };
  mutable std::atomic<const Known*> known_ = nullptr;  // replaced whole; old ones are kept, as few as registrations
};

// The entry of an op, made at first use and never freed. Thread-safe; not for the hot path.
OpEntry& entry_of(const c10::OperatorHandle& op);
OpEntry& entry_of(std::string_view name);  // "aten::add.Tensor"; throws InternalError if there is no such op
size_t entry_count();

}  // namespace tessera::propagate
