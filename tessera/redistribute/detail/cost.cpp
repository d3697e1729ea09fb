#include "tessera/redistribute/detail/cost.h"

namespace tessera::redistribute {
namespace {

// Nothing is quite free, so that of two ways that move the same the one with fewer steps wins.
constexpr double kRelabel = 0.01;
constexpr double kLocalStep = 0.05;
constexpr double kAlone = 0.1;  // a collective of one rank: posted, but nothing travels

// What a rank sends, and what it copies on its own to pack and unpack; n ranks, b bytes held before.
struct Price {
  double (*wire)(double b, double n);
  double (*copied)(double b, double n);
};

double none(double, double) { return 0; }
double held(double b, double) { return b; }

Price price_of(Move move) {
  switch (move) {
    case Move::Nothing:
    case Move::Slice:  // it copies what it keeps, but if that had a price the order of slices would have one, too
      return {none, none};
    case Move::Divide:
      return {none, held};
    case Move::AllGather:
      return {[](double b, double n) { return b * (n - 1); }, [](double b, double n) { return b * n; }};
    case Move::AllReduce:
      return {[](double b, double n) { return 2 * b * (n - 1) / n; }, held};
    case Move::ReduceScatter:
      return {[](double b, double n) { return b * (n - 1) / n; }, held};
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
  return price_of(move).wire(local_bytes, static_cast<double>(ranks));
}

double step_cost(Move move, int64_t ranks, double local_bytes) {
  const auto& model = cost_model();
  if (move == Move::Nothing) return kRelabel;
  if (communicates(move) && ranks == 1) return kAlone;
  auto [wire, copied] = price_of(move);
  auto n = static_cast<double>(ranks);
  return (communicates(move) ? model.latency : kLocalStep) + wire(local_bytes, n) / model.bytes_per_us +
         copied(local_bytes, n) / model.copy_bytes_per_us;
}

}  // namespace tessera::redistribute
