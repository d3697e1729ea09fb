#include "tessera/compile/detail/passes/coalesced_collective.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/passes/sharded_collectives.h"

#include <algorithm>

// Bucketing of all-gathers: consecutive all-gathers of one group and dtype become one collective per bucket of 25 MiB.
//
//   %2 = tessera.all_gather(%0, 0, [4, 4], @dp)             [%2, %4] = tessera.all_gather_coalesced([%0, %1], [0, 0],
//   %3 in %2 = tessera.wait(%2!, @dp)                ->                                             [4, 4, 4, 4], @dp)
//   %4 = tessera.all_gather(%1, 0, [4, 4], @dp)             %3 in %2 = tessera.wait(%2!, @dp)
//   %5 in %4 = tessera.wait(%4!, @dp)                       %5 in %4 = tessera.wait(%4!, @dp)
//
// Law: an all-gather may be posted earlier if its input is ready there. The bucket is posted at its first member; the
// views, allocations and casts that later members need move up with them. All-gathers into segments become one such
// collective on the concatenated inputs. Waits stay.
namespace tessera::compiler {
namespace {

struct AllGatherBucket {
  std::vector<ShardedCollective> members;
  std::vector<int32_t> chain = {};  // nodes that later members need; they move before the first member
  int64_t bytes = 0;
};

std::vector<AllGatherBucket> all_gather_buckets(const Program& program) {
  const Dependencies dependencies(program, Dependencies::Collectives::Any);
  std::vector<AllGatherBucket> buckets;
  for (const auto& gather : sharded_collectives(program, ShardedKind::AllGather)) {
    AllGatherBucket* bucket = nullptr;  // the last one of the group
    for (auto& each : buckets)
      if (each.members[0].group == gather.group) bucket = &each;
    if (bucket && can_share(bucket->members[0], gather) && bucket->bytes + gather.bytes <= kShardedBucketBytes) {
      const auto first = static_cast<int32_t>(bucket->members[0].node);
      const auto chain = input_chain(program, dependencies, gather.node, first);
      if (chain.after < first) {
        bucket->members.push_back(gather);
        bucket->chain.insert(bucket->chain.end(), chain.nodes.begin(), chain.nodes.end());
        std::sort(bucket->chain.begin(), bucket->chain.end());
        bucket->bytes += gather.bytes;
        continue;
      }
    }
    buckets.push_back({{gather}, {}, gather.bytes});
  }
  std::erase_if(buckets, [](const AllGatherBucket& bucket) { return bucket.members.size() == 1; });
  return buckets;
}

// All-gathers into segments: concatenates the flat inputs and gathers them into the segments of all members.
void join_all_gathers(Program& program, const AllGatherBucket& bucket, std::vector<Node>& to) {
  const auto joined = join_segments(program, bucket.members);
  const auto& first = program.nodes[bucket.members[0].node];
  const auto device = program[joined.flat[0]].type.device;
  const auto flat = program.add(Type::contiguous(bucket.members[0].dtype, {joined.numel}, device));
  to.push_back({find_op("aten.cat"), {joined.flat, c10::IValue(0)}, {flat}, first.module});
  to.push_back({find_op("tessera.all_gather_into_segments_"),
                {joined.tensors, flat, joined.segments, c10::IValue(joined.label), first.args[4]},
                {},
                first.module});
}

}  // namespace

Matched bucket_all_gathers(Program& program) {
  const auto buckets = all_gather_buckets(program);
  std::vector<const AllGatherBucket*> begins(program.nodes.size(), nullptr);
  std::vector<char> done(program.nodes.size(), 0);
  Matched matched;
  for (const auto& bucket : buckets) {
    begins[bucket.members[0].node] = &bucket;
    for (const auto& member : bucket.members) done[member.node] = 1;
    matched.times += static_cast<int64_t>(bucket.members.size());
  }
  std::vector<Node> nodes;
  const auto append = [&](size_t n) {
    if (!std::exchange(done[n], 1)) nodes.push_back(program.nodes[n]);
  };
  for (size_t n = 0; n < begins.size(); n++) {
    append(n);
    const auto* bucket = begins[n];
    if (!bucket) continue;
    for (const auto needed : bucket->chain) append(static_cast<size_t>(needed));
    if (bucket->members[0].of_segments)
      join_all_gathers(program, *bucket, nodes);
    else
      nodes.push_back(coalesced_collective(program, nodes_of(bucket->members), n));
  }
  program.nodes = std::move(nodes);
  matched.note = c10::str(matched.times, " all-gathers in ", buckets.size(), " buckets");
  return matched;
}

}  // namespace tessera::compiler
