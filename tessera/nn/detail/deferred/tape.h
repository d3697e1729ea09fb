#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <utility>
#include <vector>

// The ops that deferred_init records, and the subset of them that a tensor depends on.
//
//   op        a recorded op with its arguments
//   value     a deferred tensor: an output of an op
//   storage   memory that values share. A write to one value changes the other values of the storage.
//
//   0: %0 = empty([4, 3])            %0 on storage 0
//   1: kaiming(%0)                   writes storage 0
//   2: %1 = select(%0, 0, 2)         %1 on storage 0
//   3: fill_(%1, 0)                  writes storage 0
//   4: %2 = ones([3])                %2 on storage 1          %0 depends on the ops 0 1 2 3
namespace tessera::detail::deferred {

using Id = int64_t;
constexpr Id kNone = -1;

struct Value {
  Id made_by;  // the op
  Id storage;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  c10::Device device;   // the device that the tensor gets when it is materialized
  bool covers_storage;  // the value contains every element of its storage
  bool contiguous;
};

struct RecordedOp {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;                      // with an undefined tensor in the place of each value
  std::vector<std::pair<size_t, Id>> inputs;               // (index among all tensor arguments, lists flattened; value)
  std::vector<std::pair<at::Tensor, uint32_t>> constants;  // real tensors among the arguments, with their versions
  std::vector<Id> outputs;                                 // one per output tensor; kNone: undefined
  std::vector<Id> written;                                 // the values that the op writes to
  bool overwrites = false;  // writes every element of the one value in `written`, without reading it
};

class Tape {
 public:
  Id new_storage() { return storages_++; }
  Id add(Value value);
  Id add(RecordedOp op);
  const Value& value(Id id) const { return values_[id]; }
  const RecordedOp& op(Id id) const { return ops_[id]; }
  bool has_values() const { return !values_.empty(); }
  Id next_op() const { return static_cast<Id>(ops_.size()); }

  // The ops, in order, that must run to compute the final contents of these values.
  std::vector<Id> ops_needed_for(const std::vector<Id>& targets) const;

 private:
  std::vector<Value> values_;
  std::vector<RecordedOp> ops_;
  Id storages_ = 0;
};

// Marks a tensor on the meta device as deferred.
struct DeferredMeta final : c10::BackendMeta {
  std::shared_ptr<Tape> tape;
  Id value;
  c10::Storage meta_storage;  // the storage that LibTorch's meta kernels receive: see meta_run.h
  DeferredMeta(std::shared_ptr<Tape> tape, Id value, c10::Storage meta_storage)
      : tape(std::move(tape)), value(value), meta_storage(std::move(meta_storage)) {}
};

// Null if t is undefined, real, distributed, or on the meta device but not deferred.
const DeferredMeta* deferred_meta(const at::Tensor& t);

// Replaces each tensor of an argument by f(tensor). f also receives undefined tensors.
template <class F>
c10::IValue map_tensors(const c10::IValue& v, F&& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorList()) list.push_back(f(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList())
      list.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return v;
}

template <class F>
void each_tensor(const c10::IValue& v, F&& f) {
  map_tensors(v, [&](const at::Tensor& t) { return f(t), t; });
}

}  // namespace tessera::detail::deferred
