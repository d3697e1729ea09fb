#include "tessera/compile/detail/ir/dependencies.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/inflight_collectives.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

// The places whose order counts: buffers, then groups, then the random streams, all as one.
struct Touched {
  std::vector<int32_t> reads, writes;
};

Touched touched_by(const Program& program, const Node& node, Pending& pending, bool in_order) {
  Touched touched;
  const auto group_place = [&](int32_t group) { return program.buffers + group; };
  const auto random_place = program.buffers + static_cast<int32_t>(program.groups.size());
  node.each_read([&](ValueId id) { touched.reads.push_back(program.buffer_of(id)); });
  node.each_write([&](ValueId id) { touched.writes.push_back(program.buffer_of(id)); });
  if (!is_view(program, node)) node.each_result([&](ValueId id) { touched.writes.push_back(program.buffer_of(id)); });
  const auto kind = kind_of(node);
  if (kind == OpKind::Collective) {
    if (in_order) touched.writes.push_back(group_place(group_of(node)));
    pending.post(program, node);
  }
  if (kind == OpKind::Wait)
    for (const auto buffer : pending.wait(program, node)) touched.reads.push_back(buffer);
  if (kind == OpKind::Random) touched.writes.push_back(random_place);
  return touched;
}

}  // namespace

Dependencies::Dependencies(const Program& program, Collectives collectives)
    : before_(program.nodes.size()), after_(program.nodes.size()) {
  const auto places = static_cast<size_t>(program.buffers) + program.groups.size() + 1;
  std::vector<int32_t> writer(places, -1);
  std::vector<std::vector<int32_t>> readers(places);  // since the last write
  Pending pending;
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto touched = touched_by(program, program.nodes[n], pending, collectives == Collectives::InOrder);
    const auto node = static_cast<int32_t>(n);
    auto& before = before_[n];
    for (const auto place : touched.reads)
      if (writer[static_cast<size_t>(place)] >= 0) before.push_back(writer[static_cast<size_t>(place)]);
    for (const auto place : touched.writes) {
      if (writer[static_cast<size_t>(place)] >= 0) before.push_back(writer[static_cast<size_t>(place)]);
      for (const auto reader : readers[static_cast<size_t>(place)]) before.push_back(reader);
    }
    for (const auto place : touched.reads) readers[static_cast<size_t>(place)].push_back(node);
    for (const auto place : touched.writes) {
      writer[static_cast<size_t>(place)] = node;
      readers[static_cast<size_t>(place)].clear();
    }
    // A view writes nothing, but what reads it names it: it comes after its definition.
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
    std::erase(before, node);
  }
  std::vector<int32_t> defined_by(program.values.size(), -1);
  for (size_t n = 0; n < program.nodes.size(); n++) {
    program.nodes[n].each_read([&](ValueId id) {
      const auto by = defined_by[static_cast<size_t>(id)];
      if (by >= 0 && !std::binary_search(before_[n].begin(), before_[n].end(), by))
        before_[n].insert(std::lower_bound(before_[n].begin(), before_[n].end(), by), by);
    });
    program.nodes[n].each_result([&](ValueId id) { defined_by[static_cast<size_t>(id)] = static_cast<int32_t>(n); });
    for (const auto earlier : before_[n]) after_[static_cast<size_t>(earlier)].push_back(static_cast<int32_t>(n));
  }
}

void reorder(Program& program, const std::vector<int32_t>& order, Dependencies::Collectives collectives) {
  const Dependencies dependencies(program, collectives);
  std::vector<int32_t> place(program.nodes.size(), -1);
  for (size_t i = 0; i < order.size(); i++) place[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
  TESSERA_CHECK(order.size() == program.nodes.size() && std::count(place.begin(), place.end(), -1) == 0, InternalError,
                "an order of ", order.size(), " nodes for a program of ", program.nodes.size());
  for (size_t n = 0; n < program.nodes.size(); n++)
    for (const auto earlier : dependencies.before(n))
      TESSERA_CHECK(place[static_cast<size_t>(earlier)] < place[n], InternalError, "node ", n, " (",
                    program.nodes[n].name(), ") is put before node ", earlier, " (",
                    program.nodes[static_cast<size_t>(earlier)].name(), "), which it depends on");
  std::vector<Node> nodes;
  nodes.reserve(order.size());
  for (const auto n : order) nodes.push_back(std::move(program.nodes[static_cast<size_t>(n)]));
  program.nodes = std::move(nodes);
}

std::vector<std::vector<int32_t>> used_buffers(const Program& program) {
  std::vector<std::vector<int32_t>> used;
  used.reserve(program.nodes.size());
  Pending pending;
  for (const auto& node : program.nodes) {
    auto& here = used.emplace_back();
    node.each_read([&](ValueId id) { here.push_back(program.buffer_of(id)); });
    node.each_result([&](ValueId id) { here.push_back(program.buffer_of(id)); });
    if (kind_of(node) == OpKind::Collective) pending.post(program, node);
    if (kind_of(node) == OpKind::Wait)
      for (const auto buffer : pending.wait(program, node)) here.push_back(buffer);
  }
  return used;
}

std::vector<Lifetime> lifetimes(const Program& program) {
  std::vector<Lifetime> found(static_cast<size_t>(program.buffers));
  const auto used = used_buffers(program);
  for (size_t n = 0; n < used.size(); n++)
    for (const auto buffer : used[n]) {
      auto& lifetime = found[static_cast<size_t>(buffer)];
      if (lifetime.first < 0) lifetime.first = static_cast<int32_t>(n);
      lifetime.last = static_cast<int32_t>(n);
    }
  return found;
}

}  // namespace tessera::compiler
