#pragma once
#include "tessera/compile/detail/backward/compiled_node.h"
#include "tessera/compile/detail/replay/bindings.h"
#include "tessera/compile/api/options.h"
#include "tessera/compile/detail/replay/interpret.h"
#include "tessera/compile/detail/trace/signature.h"

#include <functional>
#include <memory>
#include <vector>

namespace tessera::compiler {

struct BackwardProgram {
  std::unique_ptr<Executable> executable;
  Program seen;                    // by a tracer: the same before it was lowered
  std::vector<int32_t> saved;      // buffers; CompiledNode keeps a tensor of each
  std::vector<int64_t> offsets;    // of those tensors when traced
  std::vector<int32_t> gradients;  // buffers of the gradients that flow in
  std::vector<Type> gradient_types;
  std::vector<SpecRef> gradient_specs;  // of outputs: gradients are made to lie like them
  std::vector<SpecRef> result_specs;
  size_t own = 0;  // of saved: forward's; the others are parameters and arguments
  bool saved_is_external(size_t i) const { return i >= own; }
  std::vector<size_t> order;  // in which backward computed its results when it was traced
  Tensors run(const Tensors& saved, Tensors gradients);
};

// A forward that was traced once together with its backward: two programs, and a node in the autograd graph for the
// second.
class CompiledForward {
 public:
  CompiledForward(const Arguments& arguments, const std::function<Tensors()>& forward, const CompileOptions& options);
  bool fits(const Signature& signature) const;
  Tensors run(const Arguments& arguments);
  const Executable& executable() const { return *executable_; }
  const BackwardProgram* backward() const { return backward_.get(); }
  const std::vector<PassReport>& report() const { return report_; }  // of both programs, backward's first

 private:
  Signature signature_;
  std::vector<CompilingScope::Guard> guards_;
  std::unique_ptr<Executable> executable_;
  Bindings bindings_, backward_bindings_;
  std::shared_ptr<BackwardProgram> backward_;  // null: nothing requires a gradient
  std::vector<SpecRef> returned_;
  std::vector<char> requires_grad_;      // of what is returned
  Tensors differentiated_;               // parameters whose gradients backward gives, then ...
  std::vector<size_t> arguments_;        // ... arguments
  std::vector<int32_t> saved_external_;  // buffers of parameters and arguments that backward reads
  size_t outputs_ = 0;
  int64_t draws_ = 0;
  std::vector<PassReport> report_;
};

// The programs of a compiled module.
class ModuleCache {
 public:
  explicit ModuleCache(CompileOptions options) : options_(std::move(options)) {}
  Tensors call(const Arguments& arguments, const std::function<Tensors()>& forward);
  const std::vector<std::unique_ptr<CompiledForward>>& programs() const { return programs_; }

 private:
  CompileOptions options_;
  std::vector<std::unique_ptr<CompiledForward>> programs_;
  std::vector<Signature> eager_;  // what cannot be compiled, and need not be
  IdlePasses idle_;
};

}  // namespace tessera::compiler
