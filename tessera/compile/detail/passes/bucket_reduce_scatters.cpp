#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/passes/sharded_collectives.h"

#include <algorithm>
#include <unordered_map>

namespace tessera::compiler {
namespace {

const std::string& op_of(const Program& program, const ShardedCollective& reduce) {
  return std::get<c10::IValue>(program.nodes[reduce.node].args[3]).toStringRef();
}

struct Bucket {
  std::vector<ShardedCollective> members;
  std::vector<char> behind;  // by node: needs what a member gives, so it goes behind the last
  int64_t bytes = 0;
};

class Buckets {
 public:
  explicit Buckets(const Program& program)
      : program_(program), dependencies_(program, Dependencies::Collectives::Any) {}

  // Reduce-scatters of one kind that follow one another and can be posted where the last is.
  std::vector<Bucket> find() const {
    std::vector<Bucket> buckets;
    for (const auto& reduce : sharded_collectives(program_, ShardedKind::ReduceScatter)) {
      if (!is_waited_for_once(reduce)) continue;
      Bucket* bucket = nullptr;
      for (auto& each : buckets)
        if (each.members[0].group == reduce.group) bucket = &each;
      if (!bucket || !fits(*bucket, reduce)) bucket = &buckets.emplace_back();
      add(*bucket, reduce);
    }
    std::erase_if(buckets, [](const Bucket& bucket) { return bucket.members.size() == 1; });
    return buckets;
  }

 private:
  bool fits(const Bucket& bucket, const ShardedCollective& reduce) const {
    if (!can_share(bucket.members[0], reduce) || op_of(program_, bucket.members[0]) != op_of(program_, reduce) ||
        bucket.bytes + reduce.bytes > kShardedBucketBytes)
      return false;
    return !bucket.behind[reduce.node];
  }

  void add(Bucket& bucket, const ShardedCollective& reduce) const {
    bucket.members.push_back(reduce);
    bucket.bytes += reduce.bytes;
    bucket.behind.resize(program_.nodes.size(), 0);
    std::vector<int32_t> left{static_cast<int32_t>(reduce.node)};
    while (!left.empty()) {
      const auto n = left.back();
      left.pop_back();
      for (const auto later : dependencies_.after(static_cast<size_t>(n)))
        if (!std::exchange(bucket.behind[static_cast<size_t>(later)], 1)) left.push_back(later);
    }
  }

  // Of runs: nothing but one wait reads what the collective gives.
  bool is_waited_for_once(const ShardedCollective& reduce) const {
    if (!reduce.of_runs) return true;
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

std::vector<int64_t> numbers(const Arg& arg) { return std::get<c10::IValue>(arg).toIntVector(); }

// Of tensors by themselves: one coalesced collective, with a result for each.
Node coalesced(const Program& program, const Bucket& bucket) {
  const auto [xs, results, dims, sizes] = coalesced_arguments(program, bucket.members);
  const auto& last = program.nodes[bucket.members.back().node];
  return {find_op("tessera.reduce_scatter_coalesced"),
          {xs, c10::IValue(dims), c10::IValue(sizes), last.args[3], last.args[4]},
          {results},
          last.module};
}

// Where the result of a member of runs lies, when all of the bucket has come, and where it is looked for.
struct Piece {
  ValueId all, out;
  int64_t begin;
};
using Pieces = std::unordered_map<ValueId, Piece>;  // by what the collective gave

// Of runs: into one buffer, of which each member gets its piece when it is waited for.
void join(Program& program, const Bucket& bucket, Pieces& pieces, std::vector<Node>& to) {
  ValueList ins;
  std::vector<std::vector<int64_t>> runs;
  std::vector<size_t> tensors;
  std::vector<std::string> labels;
  const auto last = program.nodes[bucket.members.back().node];
  int64_t total = 0;
  for (const auto& member : bucket.members)
    total += program[std::get<ValueId>(program.nodes[member.node].args[0])].type.numel();
  const auto type =
      Type::contiguous(bucket.members[0].dtype, {total}, program[std::get<ValueId>(last.args[0])].type.device);
  const auto made = program.add(type), all = program.add_in(made, type, 0);
  int64_t begin = 0;
  for (const auto& member : bucket.members) {
    const auto& node = program.nodes[member.node];
    const auto& own = std::get<ValueList>(node.args[1]);
    ins.insert(ins.end(), own.begin(), own.end());
    runs.push_back(numbers(node.args[2]));
    tensors.push_back(own.size());
    labels.push_back(std::get<c10::IValue>(node.args[4]).toStringRef());
    pieces[std::get<ValueId>(node.results[0])] = {all, std::get<ValueId>(node.args[0]), begin};
    begin += program[std::get<ValueId>(node.args[0])].type.numel();
  }
  const Arg none = c10::IValue();
  to.push_back({find_op("aten.empty.memory_format"),
                {c10::IValue(std::vector<int64_t>{total}), c10::IValue(static_cast<int64_t>(type.dtype)), none,
                 c10::IValue(type.device), none, none},
                {made},
                last.module});
  to.push_back({find_op("tessera.reduce_scatter_runs_into_"),
                {made, ins, joined_runs(runs, tensors), last.args[3], c10::IValue(joined_labels(labels)), last.args[5]},
                {all},
                last.module});
}

// In the place of a wait for one member: for all of the bucket, and then its piece goes to where it is looked for.
void wait_for(Program& program, const Node& wait, const Piece& piece, std::vector<Node>& to) {
  const auto type = program[piece.out].type;
  const auto came = program.add_in(piece.all, program[piece.all].type, 0);
  const auto part = program.add_in(piece.all, type, piece.begin);
  to.push_back({find_op("tessera.wait"), {piece.all, wait.args[1]}, {came}, wait.module});
  to.push_back({find_op("aten.as_strided"),
                {came, c10::IValue(type.sizes), c10::IValue(type.strides), c10::IValue(piece.begin)},
                {part},
                wait.module});
  to.push_back({find_op("aten.copy_"), {piece.out, part, c10::IValue(false)}, {wait.results[0]}, wait.module});
}

void apply(Program& program, const Bucket& bucket) {
  const auto last = bucket.members.back().node;
  const auto is_member = [&](size_t n) {
    return std::any_of(bucket.members.begin(), bucket.members.end(), [&](const auto& each) { return each.node == n; });
  };
  Pieces pieces;
  std::vector<Node> nodes;
  std::vector<size_t> late;
  const auto put = [&](size_t n) {
    const auto node = program.nodes[n];
    if (kind_of(node) == OpKind::Wait)
      if (const auto found = pieces.find(std::get<ValueId>(node.args[0])); found != pieces.end())
        return wait_for(program, node, found->second, nodes);
    nodes.push_back(node);
  };
  for (size_t n = 0; n < program.nodes.size(); n++) {
    if (n == last) {
      if (bucket.members[0].of_runs)
        join(program, bucket, pieces, nodes);
      else
        nodes.push_back(coalesced(program, bucket));
      for (const auto each : late) put(each);
    } else if (n < last && bucket.behind[n]) {
      late.push_back(n);
    } else if (!is_member(n)) {
      put(n);
    }
  }
  program.nodes = std::move(nodes);
}

}  // namespace

// Those behind the first are posted later, and so may those on other ranks: what was between them is posted before.
Matched bucket_reduce_scatters(Program& program) {
  Matched matched;
  int64_t made = 0;
  for (auto buckets = Buckets(program).find(); !buckets.empty(); buckets = Buckets(program).find()) {
    apply(program, buckets[0]);
    matched.times += static_cast<int64_t>(buckets[0].members.size());
    made++;
  }
  matched.note = c10::str(matched.times, " reduce-scatters in ", made, " buckets");
  return matched;
}

}  // namespace tessera::compiler
