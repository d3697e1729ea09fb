#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>
#include <utility>
#include <vector>

// What the rewrites of ops share (rewrites.h).
namespace tessera::numerics {

// The arguments of the op on top of the stack. reply() replaces them by the results.
class Arguments {
 public:
  Arguments(torch::jit::Stack* stack, size_t count) : stack_(stack), first_(stack->size() - count) {}
  const c10::IValue& operator[](size_t i) const { return (*stack_)[first_ + i]; }
  at::Tensor tensor(size_t i) const { return (*this)[i].toTensor(); }
  std::optional<at::Tensor> optional_tensor(size_t i) const {
    const auto& v = (*this)[i];
    if (!v.isTensor() || !v.toTensor().defined()) return std::nullopt;
    return v.toTensor();
  }
  double number(size_t i) const { return (*this)[i].toScalar().toDouble(); }
  template <class... Results>
  void reply(Results... results) {
    stack_->resize(first_);
    (stack_->emplace_back(std::move(results)), ...);
  }

 private:
  torch::jit::Stack* stack_;
  size_t first_;
};

// Matrix products and sums in the order of the tree, of plain tensors and DTensors.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);  // 2-D, or 3-D with a batch
// The last dim first. Each is a tree of its own, so every one of them can be sharded.
at::Tensor sum_dims(const at::Tensor& x, std::vector<int64_t> dims, bool keepdim);

// convolution.cpp
void run_convolution(torch::jit::Stack* stack, size_t count);
void run_convolution_backward(torch::jit::Stack* stack, size_t count);
// scatter.cpp: sums into elements that an index names.
void run_index_add(torch::jit::Stack* stack, size_t count);
void run_index_add_in_place(torch::jit::Stack* stack, size_t count);
void run_scatter_add(torch::jit::Stack* stack, size_t count);
void run_scatter_add_in_place(torch::jit::Stack* stack, size_t count);

}  // namespace tessera::numerics
