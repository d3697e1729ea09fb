#pragma once
#include "tessera/nn/detail/deferred/call.h"

#include <memory>
#include <utility>
#include <vector>

namespace tessera::detail::deferred {

// Writes one call down: its arguments as they are before it runs, then its results, which become deferred tensors.
class Writer {
 public:
  Writer(const DeferredCall& call, std::shared_ptr<Tape> tape, c10::Device device);
  void finish(const std::vector<c10::IValue>& results);

 private:
  // A deferred tensor, as it was before.
  struct Seen {
    Seen(const at::Tensor& t, c10::intrusive_ptr<DeferredMeta> meta, c10::Storage complaining);
    bool looks_like(const at::Tensor& t) const;  // on the same storage
    at::Tensor tensor;
    c10::intrusive_ptr<DeferredMeta> meta;
    c10::Storage complaining;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    at::ScalarType dtype;
    bool conjugated, negated;
  };
  at::Tensor argument(const at::Tensor& t, size_t place, bool is_written);
  Id output(const at::Tensor& t);

  std::shared_ptr<Tape> tape_;
  c10::Device device_;  // where the results would be
  Step step_;
  std::vector<Seen> seen_;
};

}  // namespace tessera::detail::deferred
