#include "tessera/redistribute/detail/cost.h"

namespace tessera::redistribute {
namespace {

// Every step has a small cost. So of two plans that move the same bytes, the one with fewer steps is chosen.
constexpr double kRelabel = 0.01;
constexpr double kLocalStep = 0.05;

// Bytes that a rank sends, and bytes that it copies locally to pack and unpack. n ranks; b local bytes before the step.
struct MoveBytes {
  double (*wire)(double b, double n);
  double (*copied)(double b, double n);
};

double none(double, double) { return 0; }
double local(double b, double) { return b; }

MoveBytes bytes_of(Move move) {
  switch (move) {
    case Move::Nothing:
    case Move::Slice:  // copies the shard; no cost, otherwise the cost would depend on the order of slices
      return {none, none};
    case Move::Divide:
      return {none, local};
    case Move::AllGather:
      return {[](double b, double n) { return b * (n - 1); }, [](double b, double n) { return b * n; }};
    case Move::AllReduce:
      return {[](double b, double n) { return 2 * b * (n - 1) / n; }, local};
    case Move::ReduceScatter:
      return {[](double b, double n) { return b * (n - 1) / n; }, local};
    case Move::AllToAll:
      return {[](double b, double n) { return b * (n - 1) / n; }, [](double b, double) { return 2 * b; }};
  }
  return {none, none};
}

}  // namespace

const CostModel& cost_model() {
  static const CostModel model;
  return model;
}

double wire_bytes(Move move, int64_t ranks, double local_bytes) {
  return bytes_of(move).wire(local_bytes, static_cast<double>(ranks));
}

double step_cost(Move move, int64_t ranks, double local_bytes) {
  const auto& model = cost_model();
  if (move == Move::Nothing || ranks == 1) return kRelabel;
  auto [wire, copied] = bytes_of(move);
  auto n = static_cast<double>(ranks);
  return (communicates(move) ? model.latency : kLocalStep) + wire(local_bytes, n) / model.bytes_per_us +
         copied(local_bytes, n) / model.copy_bytes_per_us;
}

}  // namespace tessera::redistribute
