#pragma once
#include "tessera/compile/detail/passes/ddp_blocks.h"
#include "tessera/compile/detail/passes/pass.h"

#include <functional>
#include <string>
#include <vector>

namespace tessera::compiler {

// The nodes that replace a bucket of all-reduces.
struct BucketRewrite {
  Program& program;
  std::vector<Node> posted = {}, waited = {};
  void add(const char* op, std::vector<Arg> args, std::vector<Arg> results) {
    posted.push_back({find_op(op), std::move(args), std::move(results)});
  }
  void add_wait(const char* op, std::vector<Arg> args, std::vector<Arg> results) {
    waited.push_back({find_op(op), std::move(args), std::move(results)});
  }
};

// Replaces the all-reduces of each bucket of several gradients by the nodes that `build` creates, behind the last
// gradient of the bucket. `build` returns the values that replace the waited ones. Users of the old values that come
// earlier move behind the new nodes. Sets the counter ddp_buckets.
using Build = std::function<std::vector<ValueId>(BucketRewrite& to, const std::vector<CommBlock>& bucket)>;
Matched fuse_ddp(Program& program, const Build& build);

}  // namespace tessera::compiler
