#include "tessera/pipelining/detail/simulate.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "tessera/base/error.h"

namespace tessera::pipelining {
namespace {

using Message = std::tuple<ActionType, int64_t, int64_t>;  // the RECV that takes it

std::optional<Message> message_of_send(const Action& action) {
  if (action.type == ActionType::SendForward)
    return Message{ActionType::RecvForward, action.stage + 1, *action.microbatch};
  if (action.type == ActionType::SendBackward)
    return Message{ActionType::RecvBackward, action.stage - 1, *action.microbatch};
  return std::nullopt;
}

// The message that a compute action uses, if its rank receives one for it.
std::optional<Message> message_used_by(const Action& part) {
  if (part.type == ActionType::Forward) return Message{ActionType::RecvForward, part.stage, *part.microbatch};
  if (part.type == ActionType::BackwardInput || part.type == ActionType::FullBackward)
    return Message{ActionType::RecvBackward, part.stage, *part.microbatch};
  return std::nullopt;
}

double seconds_of(const Action& action, const StageCost& cost) {
  switch (action.type) {
    case ActionType::Forward:
      return cost.forward;
    case ActionType::BackwardInput:
      return cost.backward_input;
    case ActionType::BackwardWeight:
      return cost.backward_weight;
    case ActionType::FullBackward:
      return cost.backward_input + cost.backward_weight;
    default:
      return 0;
  }
}

// One rank of a simulation.
struct SimulatedRank {
  const RankActions& actions;
  size_t next = 0;
  double now = 0;
  double kept = 0;
  std::set<Message> receives = {};
  RankTimeline timeline = {};
};

// When the rank can begin `action`. nullopt: data that it uses has not been sent yet.
std::optional<double> earliest_begin(const SimulatedRank& rank, const Action& action,
                                     const std::map<Message, double>& arrival) {
  double begin = rank.now;
  for (const Action& part : parts_of(action)) {
    const std::optional<Message> message = message_used_by(part);
    if (!message || !rank.receives.contains(*message)) continue;
    const auto sent = arrival.find(*message);
    if (sent == arrival.end()) return std::nullopt;
    begin = std::max(begin, sent->second);
  }
  return begin;
}

void compute(SimulatedRank& rank, const Action& action, const StageCost& cost) {
  const double end = rank.now + seconds_of(action, cost);
  rank.timeline.actions.push_back({action, rank.now, end});
  rank.timeline.busy += end - rank.now;
  rank.now = end;
  if (action.type == ActionType::Forward) rank.kept += cost.activation;
  rank.timeline.peak = std::max(rank.timeline.peak, rank.kept);
  if (action.type == ActionType::BackwardWeight || action.type == ActionType::FullBackward)
    rank.kept -= cost.activation;
}

}  // namespace

double Simulation::bubble() const {
  double busy = 0;
  for (const RankTimeline& rank : ranks) busy += rank.busy;
  const double all = seconds * static_cast<double>(ranks.size());
  return all > 0 ? 1 - busy / all : 0;
}

Simulation simulate(const ActionTable& table, const std::vector<StageCost>& stages) {
  std::vector<SimulatedRank> ranks;
  for (const RankActions& actions : table) ranks.push_back({actions});
  std::map<Message, double> arrival;
  for (bool progress = true; progress;) {
    progress = false;
    for (SimulatedRank& rank : ranks) {
      for (; rank.next < rank.actions.size(); ++rank.next, progress = true) {
        if (!rank.actions[rank.next]) continue;
        const Action& action = *rank.actions[rank.next];
        const std::optional<double> begin = earliest_begin(rank, action, arrival);
        if (!begin) break;
        rank.now = *begin;
        for (const Action& part : parts_of(action)) {
          TESSERA_CHECK(part.stage < static_cast<int64_t>(stages.size()), UsageError, "the pipeline schedule has ",
                        part, ", and costs of ", stages.size(), " stages were given");
          if (const std::optional<Message> message = message_of_send(part))
            arrival[*message] = rank.now + stages[part.stage].send;
          else if (part.type == ActionType::RecvForward || part.type == ActionType::RecvBackward)
            rank.receives.insert({part.type, part.stage, *part.microbatch});
          else if (is_compute(part.type))
            compute(rank, part, stages[part.stage]);
        }
      }
    }
  }
  Simulation simulation;
  for (size_t i = 0; i < ranks.size(); ++i) {
    TESSERA_CHECK(ranks[i].next == ranks[i].actions.size(), UsageError, "the pipeline schedule cannot run: rank ", i,
                  " waits for ever in ", *ranks[i].actions[ranks[i].next], ", its action ", ranks[i].next,
                  ": no rank sends what it receives");
    simulation.seconds = std::max(simulation.seconds, ranks[i].now);
    simulation.ranks.push_back(std::move(ranks[i].timeline));
  }
  return simulation;
}

std::string to_svg(const Simulation& simulation) {
  constexpr double kWidth = 1200;
  constexpr double kRow = 28;
  constexpr double kLeft = 60;
  const double scale = simulation.seconds > 0 ? (kWidth - kLeft) / simulation.seconds : 0;
  std::ostringstream svg;
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << ' '
      << kRow * static_cast<double>(simulation.ranks.size()) << "\" font-family=\"sans-serif\" font-size=\"10\">\n";
  for (size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const double top = kRow * static_cast<double>(rank);
    svg << "<text x=\"4\" y=\"" << top + 18 << "\">rank " << rank << "</text>\n";
    for (const TimedAction& timed : simulation.ranks[rank].actions) {
      const char* fill = timed.action.type == ActionType::Forward          ? "#9ecae1"
                         : timed.action.type == ActionType::BackwardWeight ? "#a1d99b"
                                                                           : "#fdae6b";
      const double left = kLeft + timed.begin * scale;
      const double width = (timed.end - timed.begin) * scale;
      svg << "<rect x=\"" << left << "\" y=\"" << top + 2 << "\" width=\"" << width << "\" height=\"" << kRow - 4
          << "\" fill=\"" << fill << "\" stroke=\"#555\"><title>" << timed.action << "</title></rect>\n";
      if (width > 24) svg << "<text x=\"" << left + 3 << "\" y=\"" << top + 18 << "\">" << timed.action << "</text>\n";
    }
  }
  svg << "</svg>\n";
  return svg.str();
}

}  // namespace tessera::pipelining
