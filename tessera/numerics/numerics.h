#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Training whose bits do not depend on the mesh (docs/design/numerics.md).
namespace tessera {

// In which order terms are added, on the CPU.
enum class Numerics : uint8_t {
  // LibTorch's order. It depends on the mesh, on shapes and on the number of threads. A compiled function has the bits
  // of eager mode.
  Strict,
  // Generated kernels of a compiled function may add in another order and use another library for matrix products, as
  // torch.compile does. Results are within the tolerances of torch.testing.assert_close.
  Fast,
  // The order of every sum is a function of global indices alone, in eager mode and compiled: see NumericsScope.
  Invariant,
};

// With Numerics::Invariant, every op of this thread gives bits that are a function of the global tensors alone: equal
// on every mesh of 1, 2, 3, 4, 6, 8, 12 or 24 ranks per summed dim, for every placement and number of threads. A plain
// tensor must have the same value on every rank of a mesh, or be a virtual shard (data_parallel/virtual_shards.h).
// An op without an invariant kernel throws UsageError that names it. float32 and float64 on the CPU.
//
//   ts::distribute_in_place(weight, mesh, {ts::Replicate(), ts::Shard(0)});       // dp x tp
//   auto x = ts::distribute_tensor(batch, mesh, {ts::Shard(0), ts::Replicate()});
//   const ts::NumericsScope scope(ts::Numerics::Invariant);
//   auto loss = loss_of(model(x));
//   loss.backward();
//   optimizer.step();
class NumericsScope {
 public:
  // Opens the scope on this thread. Scopes nest; Strict and Fast have no effect. The destructor closes it.
  explicit NumericsScope(Numerics numerics);
  ~NumericsScope();
  NumericsScope(const NumericsScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;  // null in a nested scope
};

// One op that runs under Numerics::Invariant, and how.
struct InvariantOp {
  std::string op;   // "aten::mm"
  std::string how;  // "exact", "elementwise", "sum tree", "decomposed"
  bool operator==(const InvariantOp&) const = default;
};
// Every op that is covered, sorted by name.
std::vector<InvariantOp> invariant_ops();

}  // namespace tessera
