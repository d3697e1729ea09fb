#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/coalesced_collective.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/passes/sharded_collectives.h"

#include <algorithm>
#include <unordered_map>

// Bucketing of reduce-scatters: consecutive reduce-scatters of one group, dtype and reduce op become one collective per
// bucket of 25 MiB.
//
//   %2 = tessera.reduce_scatter(%0, 0, [4, 4], "sum", @dp)
//   %3 in %2 = tessera.wait(%2!, @dp)
//   %4 = tessera.reduce_scatter(%1, 0, [4, 4], "sum", @dp)
//   %5 in %4 = tessera.wait(%4!, @dp)
//     ->
//   [%2, %4] = tessera.reduce_scatter_coalesced([%0, %1], [0, 0], [4, 4, 4, 4], "sum", @dp)
//   %3 in %2 = tessera.wait(%2!, @dp)
//   %5 in %4 = tessera.wait(%4!, @dp)
//
// Law: a reduce-scatter may be posted later if the nodes that need its result move behind it. The bucket is posted at
// its last member; the other ranks do the same, so the order of collectives stays equal on all ranks. Reduce-scatters
// of segments write into one flat output, and each member's part is copied out after the wait.
namespace tessera::compiler {
namespace {

const std::string& reduce_op_of(const Program& program, const ShardedCollective& reduce) {
  return std::get<c10::IValue>(program.nodes[reduce.node].args[3]).toStringRef();
}

struct ReduceScatterBucket {
  std::vector<ShardedCollective> members;
  std::vector<char> behind;  // by node: 1 if it depends on a member, so it moves behind the last one
  int64_t bytes = 0;
};

class ReduceScatterBuckets {
 public:
  explicit ReduceScatterBuckets(const Program& program)
      : program_(program), dependencies_(program, Dependencies::Collectives::Any) {}

  // Buckets of reduce-scatters that can be posted at the last member.
  std::vector<ReduceScatterBucket> find() const {
    std::vector<ReduceScatterBucket> buckets;
    for (const auto& reduce : sharded_collectives(program_, ShardedKind::ReduceScatter)) {
      if (!is_waited_for_once(reduce)) continue;
      ReduceScatterBucket* bucket = nullptr;
      for (auto& each : buckets)
        if (each.members[0].group == reduce.group) bucket = &each;
      if (!bucket || !fits(*bucket, reduce)) bucket = &buckets.emplace_back();
      add(*bucket, reduce);
    }
    std::erase_if(buckets, [](const ReduceScatterBucket& bucket) { return bucket.members.size() == 1; });
    return buckets;
  }

 private:
  bool fits(const ReduceScatterBucket& bucket, const ShardedCollective& reduce) const {
    if (!can_share(bucket.members[0], reduce) ||
        reduce_op_of(program_, bucket.members[0]) != reduce_op_of(program_, reduce) ||
        bucket.bytes + reduce.bytes > kShardedBucketBytes)
      return false;
    return !bucket.behind[reduce.node];
  }

  void add(ReduceScatterBucket& bucket, const ShardedCollective& reduce) const {
    bucket.members.push_back(reduce);
    bucket.bytes += reduce.bytes;
    bucket.behind.resize(program_.nodes.size(), 0);
    std::vector<int32_t> stack{static_cast<int32_t>(reduce.node)};
    while (!stack.empty()) {
      const auto n = stack.back();
      stack.pop_back();
      for (const auto later : dependencies_.after(static_cast<size_t>(n)))
        if (!std::exchange(bucket.behind[static_cast<size_t>(later)], 1)) stack.push_back(later);
    }
  }

  // A member with segments: one wait is the only user of its result.
  bool is_waited_for_once(const ShardedCollective& reduce) const {
    if (!reduce.of_segments) return true;
    if (!program_[std::get<ValueId>(program_.nodes[reduce.node].args[0])].type.is_contiguous()) return false;
    const auto result = std::get<ValueId>(program_.nodes[reduce.node].results[0]);
    int readers = 0;
    bool waits = true;
    for (const auto& node : program_.nodes)
      node.each_read([&](ValueId id) {
        readers += id == result;
        waits &= id != result || kind_of(node) == OpKind::Wait;
      });
    return readers == 1 && waits;
  }

  const Program& program_;
  Dependencies dependencies_;
};

// Where the result of one member is in the flat output of its bucket.
struct MemberResult {
  ValueId flat;   // result of the bucket's collective
  ValueId out;    // the tensor that the member wrote before, and that later nodes read
  int64_t begin;  // offset in `flat`
};
using MemberResults = std::unordered_map<ValueId, MemberResult>;  // by the member's old result

// Reduce-scatters of segments: allocates one flat output for the bucket. wait_for_member() copies each member's part
// out.
void join_reduce_scatters(Program& program, const ReduceScatterBucket& bucket, MemberResults& results,
                          std::vector<Node>& to) {
  const auto joined = join_segments(program, bucket.members);
  const auto last = program.nodes[bucket.members.back().node];
  const auto type = Type::contiguous(bucket.members[0].dtype, {joined.numel}, program[joined.flat.back()].type.device);
  const auto allocated = program.add(type), flat = program.add_in(allocated, type, 0);
  int64_t begin = 0;
  for (size_t i = 0; i < bucket.members.size(); i++) {
    const auto out = joined.flat[i];
    results[std::get<ValueId>(program.nodes[bucket.members[i].node].results[0])] = {flat, out, begin};
    begin += program[out].type.numel();
  }
  const Arg none = c10::IValue();
  to.push_back({find_op("aten.empty.memory_format"),
                {c10::IValue(std::vector<int64_t>{joined.numel}), c10::IValue(static_cast<int64_t>(type.dtype)), none,
                 c10::IValue(type.device), none, none},
                {allocated},
                last.module});
  to.push_back({find_op("tessera.reduce_scatter_segments_into_"),
                {allocated, joined.tensors, joined.segments, last.args[3], c10::IValue(joined.label), last.args[5]},
                {flat},
                last.module});
}

// Replaces the wait for one member: waits for the bucket and copies the member's part into its old output.
void wait_for_member(Program& program, const Node& wait, const MemberResult& member, std::vector<Node>& to) {
  const auto type = program[member.out].type;
  const auto waited = program.add_in(member.flat, program[member.flat].type, 0);
  const auto part = program.add_in(member.flat, type, member.begin);
  to.push_back({find_op("tessera.wait"), {member.flat, wait.args[1]}, {waited}, wait.module});
  to.push_back({find_op("aten.as_strided"),
                {waited, c10::IValue(type.sizes), c10::IValue(type.strides), c10::IValue(member.begin)},
                {part},
                wait.module});
  to.push_back({find_op("aten.copy_"), {member.out, part, c10::IValue(false)}, {wait.results[0]}, wait.module});
}

void rewrite_bucket(Program& program, const ReduceScatterBucket& bucket) {
  const auto last = bucket.members.back().node;
  const auto is_member = [&](size_t n) {
    return std::any_of(bucket.members.begin(), bucket.members.end(), [&](const auto& each) { return each.node == n; });
  };
  MemberResults results;
  std::vector<Node> nodes;
  std::vector<size_t> delayed;
  const auto append = [&](size_t n) {
    const auto node = program.nodes[n];
    if (kind_of(node) == OpKind::Wait)
      if (const auto found = results.find(std::get<ValueId>(node.args[0])); found != results.end())
        return wait_for_member(program, node, found->second, nodes);
    nodes.push_back(node);
  };
  for (size_t n = 0; n < program.nodes.size(); n++) {
    if (n == last) {
      if (bucket.members[0].of_segments)
        join_reduce_scatters(program, bucket, results, nodes);
      else
        nodes.push_back(coalesced_collective(program, nodes_of(bucket.members), last));
      for (const auto each : delayed) append(each);
    } else if (n < last && bucket.behind[n]) {
      delayed.push_back(n);
    } else if (!is_member(n)) {
      append(n);
    }
  }
  program.nodes = std::move(nodes);
}

}  // namespace

Matched bucket_reduce_scatters(Program& program) {
  Matched matched;
  int64_t bucket_count = 0;
  for (auto buckets = ReduceScatterBuckets(program).find(); !buckets.empty();
       buckets = ReduceScatterBuckets(program).find()) {
    rewrite_bucket(program, buckets[0]);
    matched.times += static_cast<int64_t>(buckets[0].members.size());
    bucket_count++;
  }
  matched.note = c10::str(matched.times, " reduce-scatters in ", bucket_count, " buckets");
  return matched;
}

}  // namespace tessera::compiler
