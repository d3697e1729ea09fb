#include "tessera/debug/detail/step_profile.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/records.h"

#include <algorithm>
#include <map>
#include <set>

namespace tessera::debug {
namespace {

// Whether an op is a collective or its wait(), as RecordFunction names them. Their times are those of the collectives.
bool is_comm_name(const std::string& name) {
  static const auto names = [] {
    std::set<std::string> all{"tessera::wait"};
    for (int kind = 0; kind < static_cast<int>(comm::CommKind::Count); kind++)
      for (const auto family : {comm::Family::Functional, comm::Family::C10d})
        all.insert(comm::kind_name(static_cast<comm::CommKind>(kind), family));
    return all;
  }();
  return names.contains(name);
}

double micros(int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e3; }

std::vector<std::pair<int64_t, int64_t>> blocked_intervals(const StepProfile& profile) {
  std::vector<std::pair<int64_t, int64_t>> blocked;
  for (const auto& c : profile.collectives) {
    blocked.emplace_back(c.posted, c.started);
    blocked.emplace_back(c.waited, c.done);
  }
  std::sort(blocked.begin(), blocked.end());
  return blocked;
}

Json complete_event(const std::string& name, int64_t rank, int64_t row, int64_t start, int64_t duration,
                    Json::Object arguments = {}) {
  Json::Object event{{"name", name}, {"ph", "X"},           {"pid", rank},
                     {"tid", row},   {"ts", micros(start)}, {"dur", micros(duration)}};
  if (!arguments.empty()) event.emplace_back("args", std::move(arguments));
  return event;
}

Json metadata_event(const char* what, int64_t rank, int64_t row, Json::Object arguments) {
  return Json::Object{{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", row}, {"args", std::move(arguments)}};
}

// The first free row per collective: collectives that are in flight together do not share one.
std::vector<int64_t> rows_of(const std::vector<ProfiledCollective>& collectives) {
  std::vector<int64_t> rows, row_ends;
  for (const auto& c : collectives) {
    size_t row = 0;
    while (row < row_ends.size() && row_ends[row] > c.posted) row++;
    if (row == row_ends.size()) row_ends.push_back(0);
    row_ends[row] = c.done;
    rows.push_back(static_cast<int64_t>(row));
  }
  return rows;
}

}  // namespace

std::string to_json(const StepProfile& p) {
  Json::Array names, ops, collectives, memory;
  for (const auto& name : p.names) names.emplace_back(name);
  for (const auto& op : p.ops)
    for (const int64_t number : {op.name, op.thread, op.start, op.duration}) ops.emplace_back(number);
  for (const auto& c : p.collectives)
    collectives.emplace_back(Json::Array{c.kind, c.group, c.sequence, c.bytes, c.posted, c.started, c.waited, c.done});
  for (const auto& [time, bytes] : p.memory)
    for (const int64_t number : {time, bytes}) memory.emplace_back(number);
  return Json(Json::Object{{"rank", p.rank},
                           {"step", p.step},
                           {"start", p.start},
                           {"duration", p.duration},
                           {"clock_error", p.clock_error},
                           {"names", std::move(names)},
                           {"ops", std::move(ops)},
                           {"collectives", std::move(collectives)},
                           {"memory", std::move(memory)},
                           {"dropped", p.dropped}})
      .dump();
}

StepProfile parse_step_profile(const std::string& text, const std::string& what) {
  const auto json = Json::parse(text, what);
  StepProfile p;
  p.rank = json.at("rank").number();
  p.step = json.at("step").number();
  p.start = json.at("start").number();
  p.duration = json.at("duration").number();
  p.clock_error = json.at("clock_error").number();
  p.dropped = json.at("dropped").number();
  for (const auto& name : json.at("names").items()) p.names.push_back(name.text());
  const auto ops = json.at("ops").numbers(), memory = json.at("memory").numbers();
  TESSERA_CHECK(ops.size() % 4 == 0 && memory.size() % 2 == 0, UsageError, what,
                " is not a profile: its ops are not groups of four, or its memory is not in pairs");
  for (size_t i = 0; i < ops.size(); i += 4) {
    TESSERA_CHECK(ops[i] >= 0 && ops[i] < static_cast<int64_t>(p.names.size()), UsageError, what,
                  " is not a profile: op ", i / 4, " has name ", ops[i], " of ", p.names.size());
    p.ops.push_back({ops[i], ops[i + 1], ops[i + 2], ops[i + 3]});
  }
  for (size_t i = 0; i < memory.size(); i += 2) p.memory.emplace_back(memory[i], memory[i + 1]);
  for (const auto& each : json.at("collectives").items()) {
    const auto& c = each.items();
    TESSERA_CHECK(c.size() == 8, UsageError, what, " is not a profile: a collective has ", c.size(), " values, not 8");
    p.collectives.push_back({c[0].text(), c[1].text(), c[2].number(), c[3].number(), c[4].number(), c[5].number(),
                             c[6].number(), c[7].number()});
  }
  return p;
}

std::string chrome_trace(const std::vector<StepProfile>& ranks) {
  Json::Array events;
  int64_t origin = ranks.empty() ? 0 : ranks.front().start;
  for (const auto& p : ranks) origin = std::min(origin, p.start);
  constexpr int64_t kFirstCollectiveRow = 100;
  for (const auto& p : ranks) {
    const int64_t offset = p.start - origin;
    const auto rank_name = c10::str("rank ", p.rank);
    events.push_back(metadata_event("process_name", p.rank, 0, {{"name", rank_name}}));
    events.push_back(metadata_event("process_sort_index", p.rank, 0, {{"sort_index", p.rank}}));
    events.push_back(metadata_event("thread_name", p.rank, 0, {{"name", "ops"}}));
    events.push_back(complete_event(c10::str("step ", p.step), p.rank, 0, offset, p.duration));
    for (const auto& op : p.ops)
      events.push_back(
          complete_event(p.names[static_cast<size_t>(op.name)], p.rank, op.thread, offset + op.start, op.duration));
    const auto rows = rows_of(p.collectives);
    for (size_t i = 0; i < rows.size(); i++) {
      const auto& c = p.collectives[i];
      const int64_t row = kFirstCollectiveRow + rows[i];
      if (std::find(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(i), rows[i]) ==
          rows.begin() + static_cast<std::ptrdiff_t>(i))
        events.push_back(metadata_event("thread_name", p.rank, row, {{"name", "collectives in flight"}}));
      events.push_back(
          complete_event(c10::str(c.kind, " ", c.group), p.rank, row, offset + c.posted, c.in_flight(),
                         {{"sequence", c.sequence}, {"bytes", c.bytes}, {"exposed_us", micros(c.exposed())}}));
    }
    for (const auto& [time, bytes] : p.memory)
      events.push_back(Json::Object{{"name", "memory"},
                                    {"ph", "C"},
                                    {"pid", p.rank},
                                    {"tid", int64_t{0}},
                                    {"ts", micros(offset + time)},
                                    {"args", Json::Object{{"bytes", bytes}}}});
  }
  return Json(Json::Object{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}).dump();
}

std::vector<OpTime> time_by_op(const StepProfile& profile) {
  std::map<int64_t, OpTime> by_name;
  std::map<int64_t, std::vector<const ProfiledOp*>> running;  // by thread, outermost first
  for (const auto& op : profile.ops) {
    auto& stack = running[op.thread];
    while (!stack.empty() && stack.back()->start + stack.back()->duration <= op.start) stack.pop_back();
    auto& time = by_name[op.name];
    // A distributed op calls the op of the same name on local tensors.
    if (stack.empty() || stack.back()->name != op.name) time.calls++;
    time.self += op.duration;
    if (!stack.empty()) by_name[stack.back()->name].self -= op.duration;
    stack.push_back(&op);
  }
  std::vector<OpTime> times;
  for (auto& [name, time] : by_name) {
    time.name = profile.names[static_cast<size_t>(name)];
    if (is_comm_name(time.name)) continue;
    times.push_back(time);
  }
  std::stable_sort(times.begin(), times.end(), [](const auto& a, const auto& b) { return a.self > b.self; });
  return times;
}

std::vector<CollectiveTime> time_by_collective(const StepProfile& profile) {
  std::map<std::pair<std::string, std::string>, CollectiveTime> by_kind;
  for (const auto& c : profile.collectives) {
    auto& time = by_kind[{c.kind, c.group}];
    time.calls++;
    time.bytes += c.bytes;
    time.in_flight += c.in_flight();
    time.exposed += c.exposed();
  }
  std::vector<CollectiveTime> times;
  for (auto& [key, time] : by_kind) {
    std::tie(time.kind, time.group) = key;
    times.push_back(time);
  }
  std::stable_sort(times.begin(), times.end(), [](const auto& a, const auto& b) { return a.exposed > b.exposed; });
  return times;
}

std::vector<ProfileInterval> timeline(const StepProfile& profile, int64_t resolution) {
  using Kind = ProfileInterval::Kind;
  std::vector<ProfileInterval> result;
  const auto add = [&](Kind kind, int64_t start, int64_t end) {
    if (start >= end) return;
    if (!result.empty() && result.back().kind == kind && start - result.back().end < resolution)
      result.back().end = std::max(result.back().end, end);
    else
      result.push_back({kind, start, end});
  };
  // Outermost ops, less the time in which the rank is blocked.
  const auto blocked = blocked_intervals(profile);
  size_t next = 0;
  int64_t at = 0;
  const auto add_blocked_until = [&](int64_t time) {  // intervals that start before `time`
    for (; next < blocked.size() && blocked[next].first < time; next++) {
      add(Kind::Exposed, std::max(at, blocked[next].first), blocked[next].second);
      at = std::max(at, blocked[next].second);
    }
  };
  for (const auto& op : profile.ops) {
    const int64_t end = op.start + op.duration;
    if (op.thread != 0 || end <= at) continue;
    add_blocked_until(op.start);
    while (next < blocked.size() && blocked[next].first < end) {
      add(Kind::Op, std::max(at, op.start), blocked[next].first);
      at = std::max(at, blocked[next].first);
      add_blocked_until(blocked[next].first + 1);
    }
    add(Kind::Op, std::max(at, op.start), end);
    at = std::max(at, end);
  }
  add_blocked_until(profile.duration);
  return result;
}

}  // namespace tessera::debug
