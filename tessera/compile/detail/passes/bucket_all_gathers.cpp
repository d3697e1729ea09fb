#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/passes/sharded_collectives.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

struct Bucket {
  std::vector<ShardedCollective> members;
  std::vector<int32_t> feeding = {};  // of those behind the first: go before it
  int64_t bytes = 0;
};

// All-gathers of one kind that follow one another and can be posted where the first is.
std::vector<Bucket> buckets_of(const Program& program) {
  const Dependencies dependencies(program, Dependencies::Collectives::Any);
  std::vector<Bucket> buckets;
  for (const auto& gather : sharded_collectives(program, ShardedKind::AllGather)) {
    // The last bucket of its group.
    Bucket* bucket = nullptr;
    for (auto& each : buckets)
      if (each.members[0].group == gather.group) bucket = &each;
    if (bucket && can_share(bucket->members[0], gather) && bucket->bytes + gather.bytes <= kShardedBucketBytes) {
      const auto first = static_cast<int32_t>(bucket->members[0].node);
      const auto feeding = feeding_of(program, dependencies, gather.node, first);
      if (feeding.after < first) {
        bucket->members.push_back(gather);
        bucket->feeding.insert(bucket->feeding.end(), feeding.nodes.begin(), feeding.nodes.end());
        std::sort(bucket->feeding.begin(), bucket->feeding.end());
        bucket->bytes += gather.bytes;
        continue;
      }
    }
    buckets.push_back({{gather}, {}, gather.bytes});
  }
  std::erase_if(buckets, [](const Bucket& bucket) { return bucket.members.size() == 1; });
  return buckets;
}

std::vector<int64_t> numbers(const Arg& arg) { return std::get<c10::IValue>(arg).toIntVector(); }

// Of tensors by themselves: one coalesced collective, with a result for each.
void coalesce(const Program& program, const Bucket& bucket, std::vector<Node>& to) {
  const auto [xs, results, dims, sizes] = coalesced_arguments(program, bucket.members);
  const auto& first = program.nodes[bucket.members[0].node];
  to.push_back({find_op("tessera.all_gather_coalesced"),
                {xs, c10::IValue(dims), c10::IValue(sizes), first.args[3]},
                {results},
                first.module});
}

// Of runs: parts one after the other, and the runs of all.
void join(Program& program, const Bucket& bucket, std::vector<Node>& to) {
  ValueList outs, parts;
  std::vector<std::vector<int64_t>> runs;
  std::vector<size_t> tensors;
  std::vector<std::string> labels;
  int64_t total = 0;
  for (const auto& member : bucket.members) {
    const auto& node = program.nodes[member.node];
    const auto& own = std::get<ValueList>(node.args[0]);
    outs.insert(outs.end(), own.begin(), own.end());
    parts.push_back(std::get<ValueId>(node.args[1]));
    total += program[parts.back()].type.numel();
    runs.push_back(numbers(node.args[2]));
    tensors.push_back(own.size());
    labels.push_back(std::get<c10::IValue>(node.args[3]).toStringRef());
  }
  const auto& first = program.nodes[bucket.members[0].node];
  const auto joined = program.add(Type::contiguous(bucket.members[0].dtype, {total}, program[parts[0]].type.device));
  to.push_back({find_op("aten.cat"), {parts, c10::IValue(0)}, {joined}, first.module});
  to.push_back({find_op("tessera.all_gather_into_runs_"),
                {outs, joined, joined_runs(runs, tensors), c10::IValue(joined_labels(labels)), first.args[4]},
                {},
                first.module});
}

}  // namespace

// Each waits for its own result, as before.
Matched bucket_all_gathers(Program& program) {
  const auto buckets = buckets_of(program);
  std::vector<const Bucket*> begins(program.nodes.size(), nullptr);
  std::vector<char> done(program.nodes.size(), 0);
  Matched matched;
  for (const auto& bucket : buckets) {
    begins[bucket.members[0].node] = &bucket;
    for (const auto& member : bucket.members) done[member.node] = 1;
    matched.times += static_cast<int64_t>(bucket.members.size());
  }
  std::vector<Node> nodes;
  const auto put = [&](size_t n) {
    if (!std::exchange(done[n], 1)) nodes.push_back(program.nodes[n]);
  };
  for (size_t n = 0; n < begins.size(); n++) {
    put(n);
    const auto* bucket = begins[n];
    if (!bucket) continue;
    for (const auto fed : bucket->feeding) put(static_cast<size_t>(fed));
    bucket->members[0].of_runs ? join(program, *bucket, nodes) : coalesce(program, *bucket, nodes);
  }
  program.nodes = std::move(nodes);
  matched.note = c10::str(matched.times, " all-gathers in ", buckets.size(), " buckets");
  return matched;
}

}  // namespace tessera::compiler
