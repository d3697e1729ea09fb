#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/passes/passes.h"

#include <optional>
#include <string>

// Collectives of one kind that follow one another on a group become one that carries them all:
//
//   %2 = tessera.all_reduce(%0, "sum", @tp)               [%2, %4] = tessera.all_reduce_coalesced([%0, %1], "sum", @tp)
//   %3 in %2 = tessera.wait(%2!, @tp)               ->    %3 in %2 = tessera.wait(%2!, @tp)
//   %4 = tessera.all_reduce(%1, "sum", @tp)               %5 in %4 = tessera.wait(%4!, @tp)
//   %5 in %4 = tessera.wait(%4!, @tp)
//
// It is posted where the last of them was; what needs the results of the others moves behind it. Their order among the
// collectives of a group stays as it was. Sizes are those of whole tensors, so that ranks with uneven pieces decide
// alike.
namespace tessera::compiler {
namespace {

struct Kind {
  const char* one;
  const char* coalesced;
  bool has_dims;    // arguments 1 and 2 are a dim and the sizes of pieces along it
  bool gives_more;  // the result is the whole, not the argument
};
constexpr Kind kKinds[] = {
    {"tessera.all_gather", "tessera.all_gather_coalesced", true, true},
    {"tessera.all_reduce", "tessera.all_reduce_coalesced", false, false},
    {"tessera.reduce_scatter", "tessera.reduce_scatter_coalesced", true, false},
};

const Kind* kind_to_merge(const Node& node) {
  const auto name = node.name();
  for (const auto& kind : kKinds)
    if (name == kind.one) return &kind;
  return nullptr;
}

ValueId given(const Node& node) { return std::get<ValueId>(node.args[0]); }
ValueId made(const Node& node) { return std::get<ValueId>(node.results[0]); }
int64_t whole_bytes(const Program& program, const Kind& kind, const Node& node) {
  return program[kind.gives_more ? made(node) : given(node)].type.bytes();
}

constexpr char kFree = 0, kDelayed = 1, kMember = 2;
struct Bucket {
  const Kind* kind = nullptr;
  std::vector<size_t> members = {};  // nodes
  int64_t bytes = 0;
  std::vector<char> delayed = {};  // by node: does it need a result of a member?
};

bool goes_with(const Program& program, const Bucket& bucket, const Node& node, int64_t most) {
  const auto* kind = kind_to_merge(node);
  if (kind != bucket.kind || bucket.bytes + whole_bytes(program, *kind, node) > most) return false;
  const auto& first = program.nodes[bucket.members[0]];
  const auto& type = program[given(node)].type;
  if (type.dtype != program[given(first)].type.dtype || !type.is_contiguous()) return false;
  return kind->gives_more || same(first.args[first.args.size() - 2], node.args[node.args.size() - 2]);  // "sum"
}

// The first run of collectives on a group that can be one, from a node on.
std::optional<Bucket> find_bucket(const Program& program, const Dependencies& dependencies, int32_t group, int64_t most,
                                  size_t& from) {
  Bucket bucket;
  for (size_t n = from; n < program.nodes.size(); n++) {
    const auto& node = program.nodes[n];
    const bool collective = kind_of(node) == OpKind::Collective;
    const bool here = collective && group_of(node) == group;
    bool delayed = false;
    if (!bucket.members.empty())
      for (const auto earlier : dependencies.before(n)) {
        const auto is = bucket.delayed[static_cast<size_t>(earlier)];
        delayed |= here ? is == kDelayed : is != kFree;  // it comes behind members in any case
      }
    if (here && !delayed && bucket.kind && goes_with(program, bucket, node, most)) {
      bucket.members.push_back(n);
      bucket.delayed[n] = kMember;
      bucket.bytes += whole_bytes(program, *bucket.kind, node);
      from = n + 1;
      continue;
    }
    // The next begins a bucket of its own; a collective that would have to move ends this one.
    if (here || (collective && delayed)) {
      if (bucket.members.size() > 1) return bucket;
      bucket = {};
      from = n + 1;
      const auto* kind = here ? kind_to_merge(node) : nullptr;
      if (kind && program[given(node)].type.is_contiguous()) {
        bucket = {kind, {n}, whole_bytes(program, *kind, node), std::vector<char>(program.nodes.size(), kFree)};
        bucket.delayed[n] = kMember;
      }
      continue;
    }
    if (delayed) bucket.delayed[n] = kDelayed;
  }
  if (bucket.members.size() > 1) return bucket;
  return {};
}

Node coalesced(const Program& program, const Bucket& bucket) {
  const auto& last = program.nodes[bucket.members.back()];
  ValueList xs, results;
  std::vector<int64_t> dims, sizes;
  for (const auto n : bucket.members) {
    const auto& node = program.nodes[n];
    xs.push_back(given(node));
    results.push_back(made(node));
    if (!bucket.kind->has_dims) continue;
    dims.push_back(std::get<c10::IValue>(node.args[1]).toInt());
    for (const auto size : std::get<c10::IValue>(node.args[2]).toIntVector()) sizes.push_back(size);
  }
  Node node{find_op(bucket.kind->coalesced), {xs}, {results}, last.module};
  if (bucket.kind->has_dims) node.args.insert(node.args.end(), {c10::IValue(dims), c10::IValue(sizes)});
  for (size_t i = bucket.kind->has_dims ? 3 : 1; i < last.args.size(); i++) node.args.push_back(last.args[i]);
  return node;
}

void merge(Program& program, const Bucket& bucket) {
  const auto last = bucket.members.back();
  auto merged = coalesced(program, bucket);
  std::vector<Node> nodes, later;
  size_t next = 0;
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const bool member = next < bucket.members.size() && bucket.members[next] == n;
    if (member) next++;
    if (n == last) {
      nodes.push_back(std::move(merged));
      for (auto& node : later) nodes.push_back(std::move(node));
    } else if (!member) {
      (n < last && bucket.delayed[n] == kDelayed ? later : nodes).push_back(std::move(program.nodes[n]));
    }
  }
  program.nodes = std::move(nodes);
}

}  // namespace

Matched merge_collectives(Program& program, const PassSettings& settings) {
  Matched matched;
  int64_t before = 0;
  for (size_t g = 0; g < program.groups.size(); g++) {
    if (size_of_group(program, static_cast<int32_t>(g)) == 1) continue;
    size_t from = 0;
    for (;;) {
      const Dependencies dependencies(program);
      const auto count = program.nodes.size();
      const auto bucket = find_bucket(program, dependencies, static_cast<int32_t>(g), settings.at("bytes"), from);
      if (!bucket) break;
      merge(program, *bucket);
      before += static_cast<int64_t>(bucket->members.size());
      from -= std::min(from, count - program.nodes.size());
      matched.times++;
    }
  }
  matched.note = c10::str(before, " collectives in ", matched.times);
  return matched;
}

}  // namespace tessera::compiler
