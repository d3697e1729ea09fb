#pragma once
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/propagate/detail/op_entry.h"
#include "tessera/redistribute/detail/plan.h"

#include <c10/util/ArrayRef.h>

#include <vector>

// Lets a debug mode see every op on distributed tensors. While one is set on a thread, ops take the boxed path.
namespace tessera::detail {

class OpObserver {
 public:
  virtual ~OpObserver() = default;
  // An op is about to run on specs `in` (null: a plain tensor); what it causes is reported before end_op.
  virtual void begin_op(const propagate::OpEntry& entry, c10::ArrayRef<const TensorSpec*> in) = 0;
  // Tensor number `tensor` is about to be moved: one or several in a row, then redistributed() when all have been.
  virtual void redistributes(int tensor, const TensorSpec& from, const TensorSpec& to, bool is_explicit) = 0;
  virtual void redistributed() = 0;
  virtual void end_op(c10::ArrayRef<const TensorSpec*> out) = 0;
};

// The observer of this thread, or null.
OpObserver*& op_observer();

}  // namespace tessera::detail
