#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/replay/one_caller.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <memory>
#include <vector>

namespace tessera::compiler {

// The backward program of a compiled module. Its inputs are tensors saved by forward and the gradients of the outputs;
// its results are the gradients of parameters and arguments.
struct BackwardProgram {
  std::unique_ptr<Executable> executable;
  Program before_lowering;  // the program after its passes, which an outer tracer can record op by op

  // Saved tensors, one per buffer: first those that forward computes, then parameters and arguments.
  std::vector<int32_t> saved_buffers;
  std::vector<int64_t> saved_offsets;  // storage offsets of these tensors at tracing
  size_t saved_by_forward = 0;

  // Gradients of the outputs.
  std::vector<int32_t> gradient_buffers;
  std::vector<Type> gradient_types;
  std::vector<SpecRef> gradient_specs;  // an incoming gradient is redistributed to this spec; null: a plain tensor

  std::shared_ptr<std::vector<double>> numbers;  // of the call of forward, which the program reads; may be null

  // Set if CompileOptions::split_backward is: then the results of this program are the gradients of the arguments and
  // the values that `weights` needs; `weights` computes the gradients of the parameters. Its first saved tensors are
  // these values, then come those of this program.
  std::shared_ptr<BackwardProgram> weights;

  std::vector<SpecRef> result_specs;
  std::vector<size_t> result_order;  // indices of results in the order in which eager backward computes them

  OneCaller caller;

  // `saved`: one per saved buffer. An undefined gradient counts as zeros.
  Tensors run(const Tensors& saved, Tensors gradients);

 private:
  void prepare(Tensors& gradients) const;
  int64_t shift_of(size_t saved, const at::Tensor& local) const;
  Tensors interpret_ops(const Tensors& saved, const Tensors& gradients) const;
  Tensors replay(const Tensors& saved, const Tensors& gradients);
};

// Indices of the defined outputs of a program, ordered by the node that computes each.
std::vector<size_t> outputs_by_node(const Program& program);

}  // namespace tessera::compiler
