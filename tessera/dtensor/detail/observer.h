#pragma once
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/propagate/detail/op_entry.h"
#include "tessera/redistribute/detail/plan.h"

#include <c10/util/ArrayRef.h>

#include <vector>

// The interface through which a debug mode sees every op on DTensors. While a thread has an observer, all its ops take
// the boxed kernel.
namespace tessera::detail {

class OpObserver {
 public:
  virtual ~OpObserver() = default;
  // Called before an op with the specs of its inputs (null: a plain tensor). All events of the op follow before
  // end_op().
  virtual void begin_op(const propagate::OpEntry& entry, c10::ArrayRef<const TensorSpec*> in) = 0;
  // Called before the redistribution of tensor number `tensor`. After one or several such calls, redistributed()
  // follows when all of them are complete.
  virtual void redistributes(int tensor, const TensorSpec& from, const TensorSpec& to, bool is_explicit) = 0;
  virtual void redistributed() = 0;
  virtual void end_op(c10::ArrayRef<const TensorSpec*> out) = 0;
};

// The observer of this thread, or null.
OpObserver*& op_observer();

}  // namespace tessera::detail
