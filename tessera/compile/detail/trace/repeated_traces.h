#pragma once
#include "tessera/compile/detail/trace/tracer.h"

#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

// A step is traced several times: until its inputs are known, and then once more. All traces start from the same state,
// so the last two must give the same program, and no trace may use a tensor that an earlier one has left behind. They
// do if the step reads state of the host that it also changes: a counter, the state of an optimizer of torch::optim, a
// tensor variable that it assigns. Its replay would repeat the first call forever.
class RepeatedTraces {
 public:
  // After each trace that was not restarted, while its results are alive.
  // UsageError if the trace uses a tensor that the one before has allocated. A variable that the step assigns then gets
  // the values that it had before the first trace, in its present tensor.
  void check_captured(const Tracer& tracer);
  // After a complete trace. False: it is the first one, trace again. UsageError if the second one is another program.
  // `returned`: what the function returns besides tensors.
  bool confirms(const Tracer::Result& traced, const std::string& returned);
  // The generators that the traces drew from.
  const std::vector<at::Generator>& generators() const { return generators_; }

 private:
  std::vector<at::Tensor> before_;                               // captured tensors of the first trace
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> left_;  // allocated by the last trace, and alive after it
  bool any_ = false;
  std::vector<at::Generator> generators_;
  std::optional<std::string> text_;  // of the first complete trace
  std::vector<at::Tensor> constants_;
};

}  // namespace tessera::compiler
