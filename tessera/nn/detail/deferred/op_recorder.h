#pragma once
#include "tessera/nn/detail/deferred/call.h"

#include <memory>
#include <utility>
#include <vector>

namespace tessera::detail::deferred {

// Records one op on the tape: its arguments before it runs, then its outputs, which become deferred tensors.
class OpRecorder {
 public:
  OpRecorder(const DeferredCall& call, std::shared_ptr<Tape> tape, c10::Device device);
  void finish(const std::vector<c10::IValue>& outputs);

 private:
  // The geometry of a deferred argument before the op runs.
  struct Snapshot {
    Snapshot(const at::Tensor& t, c10::intrusive_ptr<DeferredMeta> meta, c10::Storage error_storage);
    bool same_geometry(const at::Tensor& t) const;  // given that t has the same storage
    at::Tensor tensor;
    c10::intrusive_ptr<DeferredMeta> meta;
    c10::Storage error_storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    at::ScalarType dtype;
    bool conjugated, negated;
  };
  at::Tensor argument(const at::Tensor& t, size_t index, bool is_written);
  Id output(const at::Tensor& t);

  std::shared_ptr<Tape> tape_;
  c10::Device device_;  // the device that the outputs would have
  RecordedOp op_;
  std::vector<Snapshot> snapshots_;
};

}  // namespace tessera::detail::deferred
