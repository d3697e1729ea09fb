#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Training whose bits do not depend on the mesh (docs/design/numerics.md).
namespace tessera {

// While alive, every op of this thread gives bits that are a function of the global tensors alone: equal on every mesh
// of 1, 2, 3, 4, 6, 8, 12 or 24 ranks per summed dim, for every placement and number of threads. All parallelism must
// be in placements: parameters and batch are DTensors, and a plain tensor has the same value on every rank.
// An op without an invariant kernel throws UsageError that names it. float32 and float64 on the CPU.
//
//   ts::distribute_in_place(weight, mesh, {ts::Replicate(), ts::Shard(0)});       // dp x tp
//   auto x = ts::distribute_tensor(batch, mesh, {ts::Shard(0), ts::Replicate()});
//   const ts::InvariantNumerics scope;
//   auto loss = loss_of(model(x));
//   loss.backward();
//   optimizer.step();
class InvariantNumerics {
 public:
  InvariantNumerics();   // opens the scope on this thread; scopes nest
  ~InvariantNumerics();  // restores the numerics of the outer scope
  InvariantNumerics(const InvariantNumerics&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;  // null in a nested scope
};

// One op that runs under InvariantNumerics, and how.
struct InvariantOp {
  std::string op;   // "aten::mm"
  std::string how;  // "exact", "elementwise", "sum tree", "decomposed"
  bool operator==(const InvariantOp&) const = default;
};
// Every op that is covered, sorted by name.
std::vector<InvariantOp> invariant_ops();

}  // namespace tessera
