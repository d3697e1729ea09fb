#include "tessera/compile/detail/ir/dependencies.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/inflight_collectives.h"
#include "tessera/compile/detail/ir/op_table.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

// The resources that a node reads and writes. Resources are numbered: first the buffers, then the groups (a collective
// in order "writes" its group), then the random generator state.
struct Touched {
  std::vector<int32_t> reads, writes;
};

Touched touched_by(const Program& program, const Node& node, InFlightCollectives& inflight, bool in_order) {
  Touched touched;
  const auto group_resource = [&](int32_t group) { return program.buffers + group; };
  const auto random_resource = program.buffers + static_cast<int32_t>(program.groups.size());
  node.each_read([&](ValueId id) { touched.reads.push_back(program.buffer_of(id)); });
  node.each_write([&](ValueId id) { touched.writes.push_back(program.buffer_of(id)); });
  if (!is_view(program, node)) node.each_result([&](ValueId id) { touched.writes.push_back(program.buffer_of(id)); });
  const auto kind = kind_of(node);
  if (kind == OpKind::Collective) {
    if (in_order) touched.writes.push_back(group_resource(group_of(node)));
    inflight.post(program, node);
  }
  if (kind == OpKind::Wait)
    for (const auto buffer : inflight.wait(program, node)) touched.reads.push_back(buffer);
  if (kind == OpKind::Random) touched.writes.push_back(random_resource);
  return touched;
}

}  // namespace

Dependencies::Dependencies(const Program& program, Collectives collectives)
    : before_(program.nodes.size()), after_(program.nodes.size()) {
  const auto resources = static_cast<size_t>(program.buffers) + program.groups.size() + 1;
  std::vector<int32_t> writer(resources, -1);
  std::vector<std::vector<int32_t>> readers(resources);  // since the last write
  InFlightCollectives inflight;
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto touched = touched_by(program, program.nodes[n], inflight, collectives == Collectives::InOrder);
    const auto node = static_cast<int32_t>(n);
    auto& before = before_[n];
    for (const auto resource : touched.reads)
      if (writer[static_cast<size_t>(resource)] >= 0) before.push_back(writer[static_cast<size_t>(resource)]);
    for (const auto resource : touched.writes) {
      if (writer[static_cast<size_t>(resource)] >= 0) before.push_back(writer[static_cast<size_t>(resource)]);
      for (const auto reader : readers[static_cast<size_t>(resource)]) before.push_back(reader);
    }
    for (const auto resource : touched.reads) readers[static_cast<size_t>(resource)].push_back(node);
    for (const auto resource : touched.writes) {
      writer[static_cast<size_t>(resource)] = node;
      readers[static_cast<size_t>(resource)].clear();
    }
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
    std::erase(before, node);
  }
  // A view writes no buffer, so the loop above misses it: a use also comes after the definition of its value.
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
  std::vector<int32_t> position(program.nodes.size(), -1);
  for (size_t i = 0; i < order.size(); i++) position[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
  TESSERA_CHECK(order.size() == program.nodes.size() && std::count(position.begin(), position.end(), -1) == 0,
                InternalError, "reorder: the order has ", order.size(), " nodes and the program has ",
                program.nodes.size());
  for (size_t n = 0; n < program.nodes.size(); n++)
    for (const auto earlier : dependencies.before(n))
      TESSERA_CHECK(position[static_cast<size_t>(earlier)] < position[n], InternalError, "node ", n, " (",
                    program.nodes[n].name(), ") is ordered before node ", earlier, " (",
                    program.nodes[static_cast<size_t>(earlier)].name(), "), which it depends on");
  std::vector<Node> nodes;
  nodes.reserve(order.size());
  for (const auto n : order) nodes.push_back(std::move(program.nodes[static_cast<size_t>(n)]));
  program.nodes = std::move(nodes);
}

namespace {

// Calls f(n, buffer) for the buffers that node n uses, one after the other. A wait uses those of its collective.
template <class F>
void each_used_buffer(const Program& program, const F& f) {
  InFlightCollectives inflight;
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto& node = program.nodes[n];
    node.each_read([&](ValueId id) { f(n, program.buffer_of(id)); });
    node.each_result([&](ValueId id) { f(n, program.buffer_of(id)); });
    const auto kind = kind_of(node);
    if (kind == OpKind::Collective) inflight.post(program, node);
    if (kind == OpKind::Wait)
      for (const auto buffer : inflight.wait(program, node)) f(n, buffer);
  }
}

}  // namespace

std::vector<std::vector<int32_t>> used_buffers(const Program& program) {
  std::vector<std::vector<int32_t>> used(program.nodes.size());
  each_used_buffer(program, [&](size_t n, int32_t buffer) { used[n].push_back(buffer); });
  return used;
}

std::vector<Lifetime> lifetimes(const Program& program) {
  std::vector<Lifetime> found(static_cast<size_t>(program.buffers));
  each_used_buffer(program, [&](size_t n, int32_t buffer) {
    auto& lifetime = found[static_cast<size_t>(buffer)];
    if (lifetime.first < 0) lifetime.first = static_cast<int32_t>(n);
    lifetime.last = static_cast<int32_t>(n);
  });
  return found;
}

}  // namespace tessera::compiler
