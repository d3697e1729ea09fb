#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <utility>
#include <vector>

// What deferred_init writes down, and which part of it one tensor needs.
//
//   step      an op that ran, with its arguments
//   value     a deferred tensor: what a step gave
//   storage   memory that values share. A write to one value changes all of its storage.
//
//   0: %0 = empty([4, 3])            %0 on storage 0
//   1: kaiming(%0)                   writes storage 0
//   2: %1 = select(%0, 0, 2)         %1 on storage 0
//   3: fill_(%1, 0)                  writes storage 0
//   4: %2 = ones([3])                %2 on storage 1          the recipe of %0 is 0 1 2 3
namespace tessera::detail::deferred {

using Id = int64_t;
constexpr Id kNone = -1;

struct Value {
  Id step;  // that made it
  Id storage;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  c10::Device device;   // where it would be
  bool covers_storage;  // no element of the storage is outside of it
  bool contiguous;
};

struct Step {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;         // an undefined tensor where a value goes
  std::vector<std::pair<size_t, Id>> inputs;  // which tensor of the arguments, counted through lists, is which value
  std::vector<std::pair<at::Tensor, uint32_t>> constants;  // real tensors among the arguments, and their versions
  std::vector<Id> outputs;                                 // one for each tensor of the results; kNone: undefined
  std::vector<Id> written;                                 // values
  bool overwrites = false;                                 // all of the one value that it writes, without reading it
};

class Tape {
 public:
  Id new_storage() { return storages_++; }
  Id add(Value value);
  Id add(Step step);
  const Value& value(Id id) const { return values_[id]; }
  const Step& step(Id id) const { return steps_[id]; }
  bool has_values() const { return !values_.empty(); }
  Id next_step() const { return static_cast<Id>(steps_.size()); }

  // The steps, in order, that must run for these values to be as they are at the end of the tape.
  std::vector<Id> recipe(const std::vector<Id>& targets) const;

 private:
  std::vector<Value> values_;
  std::vector<Step> steps_;
  Id storages_ = 0;
};

// What makes a tensor on the meta device a deferred one.
struct DeferredMeta final : c10::BackendMeta {
  std::shared_ptr<Tape> tape;
  Id value;
  c10::Storage quiet;  // what LibTorch's kernels for meta are shown: see run_on_meta.h
  DeferredMeta(std::shared_ptr<Tape> tape, Id value, c10::Storage quiet)
      : tape(std::move(tape)), value(value), quiet(std::move(quiet)) {}
};

// Null if t is undefined, real, distributed, or on the meta device without a recipe.
const DeferredMeta* deferred_meta(const at::Tensor& t);

// Calls f(tensor) -> tensor for each tensor of an argument, undefined ones included, and puts what it gives there.
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
