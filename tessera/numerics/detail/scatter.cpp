#include "tessera/base/error.h"
#include "tessera/numerics/detail/rewrite_arguments.h"
#include "tessera/numerics/detail/tree_ops.h"

namespace tessera::numerics {
namespace {

using at::Tensor;
using torch::jit::Stack;

// An index for each element of the source.
Tensor index_like(const Tensor& source, int64_t dim, const Tensor& index) {
  if (source.dim() == 0) return index.reshape({});
  std::vector<int64_t> sizes(static_cast<size_t>(source.dim()), 1);
  sizes[static_cast<size_t>(dim)] = -1;
  return index.reshape(sizes).expand(source.sizes());
}

Tensor index_add(const Arguments& args) {  // self, dim, index, source, alpha
  TESSERA_CHECK(args.number(4) == 1, UsageError, "Numerics::Invariant: index_add with alpha ", args.number(4),
                "; multiply the source first");
  const auto self = args.tensor(0), source = args.tensor(3);
  const int64_t dim = args[1].toInt() < 0 ? args[1].toInt() + self.dim() : args[1].toInt();
  return add_at(self, dim, index_like(source, dim, args.tensor(2)), source);
}

Tensor scatter_add(const Arguments& args) {  // self, dim, index, src
  const auto self = args.tensor(0);
  const int64_t dim = args[1].toInt() < 0 ? args[1].toInt() + self.dim() : args[1].toInt();
  return add_at(self, dim, args.tensor(2), args.tensor(3));
}

template <class Op>
void run_in_place(Stack* stack, size_t count, Op op) {
  Arguments args(stack, count);
  auto self = args.tensor(0);
  self.copy_(op(args));
  args.reply(self);
}

}  // namespace

void run_index_add(Stack* stack, size_t count) {
  Arguments args(stack, count);
  args.reply(index_add(args));
}
void run_index_add_in_place(Stack* stack, size_t count) { run_in_place(stack, count, index_add); }
void run_scatter_add(Stack* stack, size_t count) {
  Arguments args(stack, count);
  args.reply(scatter_add(args));
}
void run_scatter_add_in_place(Stack* stack, size_t count) { run_in_place(stack, count, scatter_add); }

}  // namespace tessera::numerics
