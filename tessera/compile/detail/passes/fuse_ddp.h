#pragma once
#include "tessera/compile/detail/passes/ddp_blocks.h"
#include "tessera/compile/detail/passes/pass.h"

#include <functional>
#include <string>
#include <vector>

namespace tessera::compiler {

// What takes the place of a bucket of reductions.
struct Rewrite {
  Program& program;
  std::vector<Node> posted = {}, waited = {};
  void add(const char* op, std::vector<Arg> args, std::vector<Arg> results) {
    posted.push_back({find_op(op), std::move(args), std::move(results)});
  }
  void add_wait(const char* op, std::vector<Arg> args, std::vector<Arg> results) {
    waited.push_back({find_op(op), std::move(args), std::move(results)});
  }
};

// Replaces the reductions of each bucket of more than one gradient by what `build` makes of it, right after the last
// of its gradients is there; build gives the values to read instead of the waited ones. Readers that stood before that
// place move behind it. Sets the counter ddp_buckets.
using Build = std::function<std::vector<ValueId>(Rewrite& to, const std::vector<CommBlock>& bucket)>;
Matched fuse_ddp(Program& program, const Build& build);

}  // namespace tessera::compiler
