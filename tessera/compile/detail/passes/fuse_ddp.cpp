#include "tessera/compile/detail/passes/fuse_ddp.h"

#include "tessera/compile/api/counters.h"

#include <algorithm>
#include <unordered_map>

namespace tessera::compiler {

Matched fuse_ddp(Program& program, const Build& build) {
  const auto blocks = find_comm_blocks(program);
  const auto buckets = bucket_blocks(program, blocks);
  counters()["inductor"]["ddp_buckets"] = static_cast<int64_t>(buckets.size());
  Matched matched{0, c10::str(blocks.size(), " reductions in ", buckets.size(), " buckets")};

  std::vector<char> removed(program.nodes.size(), 0);
  std::unordered_map<ValueId, ValueId> replaced;
  std::vector<std::pair<size_t, BucketRewrite>> rewrites;  // inserted after the node
  for (const auto& bucket : buckets) {
    if (bucket.size() == 1) continue;
    BucketRewrite rewrite{program};
    const auto values = build(rewrite, bucket);
    size_t last = 0;
    for (size_t i = 0; i < bucket.size(); i++) {
      const auto& block = bucket[i];
      last = std::max(last, block.divide);
      removed[block.divide] = removed[block.reduce] = removed[block.wait] = 1;
      replaced[block.waited] = values[i];
    }
    rewrites.emplace_back(last, std::move(rewrite));
    matched.times++;
  }

  const auto replacement = [&](ValueId id) {
    const auto found = replaced.find(id);
    return found == replaced.end() ? id : found->second;
  };
  // A node that uses a result of a bucket and comes before it moves behind the bucket. Moved nodes keep their order.
  std::vector<Node> nodes;
  std::vector<std::vector<Node>> moved(rewrites.size());
  const auto bucket_of = [&](ValueId id) {
    for (size_t r = 0; r < rewrites.size(); r++)
      for (const auto& node : rewrites[r].second.waited) {
        bool here = false;
        node.each_result([&](ValueId result) { here |= result == id; });
        if (here) return r;
      }
    return rewrites.size();
  };
  std::vector<size_t> waits_for(program.values.size(), rewrites.size());
  for (size_t n = 0; n < program.nodes.size(); n++) {
    if (!removed[n]) {
      auto node = std::move(program.nodes[n]);
      size_t behind = rewrites.size();
      node.each_read([&](ValueId id) {
        const auto now = replacement(id);
        const auto r = now != id ? bucket_of(now) : waits_for[static_cast<size_t>(id)];
        if (r < rewrites.size() && rewrites[r].first >= n) behind = behind == rewrites.size() ? r : std::max(behind, r);
      });
      node.replace_reads(replacement);
      if (behind < rewrites.size()) {
        node.each_result([&](ValueId id) { waits_for[static_cast<size_t>(id)] = behind; });
        moved[behind].push_back(std::move(node));
      } else {
        nodes.push_back(std::move(node));
      }
    }
    for (size_t r = 0; r < rewrites.size(); r++) {
      if (rewrites[r].first != n) continue;
      for (auto* part : {&rewrites[r].second.posted, &rewrites[r].second.waited, &moved[r]})
        for (auto& node : *part) nodes.push_back(node);
    }
  }
  for (auto& output : program.outputs)
    if (output.value != kNone) output.value = replacement(output.value);
  program.nodes = std::move(nodes);
  return matched;
}

}  // namespace tessera::compiler
