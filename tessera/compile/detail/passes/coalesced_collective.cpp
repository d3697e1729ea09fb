#include "tessera/compile/detail/passes/coalesced_collective.h"

namespace tessera::compiler {

Node coalesced_collective(const Program& program, const std::vector<size_t>& members, size_t like) {
  const auto& model = program.nodes[like];
  const bool has_dims = model.name() != "tessera.all_reduce";  // arguments 1 and 2: a dim and the shard sizes along it
  ValueList inputs, results;
  std::vector<int64_t> dims, sizes;
  for (const auto n : members) {
    const auto& node = program.nodes[n];
    inputs.push_back(std::get<ValueId>(node.args[0]));
    results.push_back(std::get<ValueId>(node.results[0]));
    if (!has_dims) continue;
    dims.push_back(std::get<c10::IValue>(node.args[1]).toInt());
    for (const auto size : std::get<c10::IValue>(node.args[2]).toIntVector()) sizes.push_back(size);
  }
  Node node{find_op(model.name() + "_coalesced"), {inputs}, {results}, model.module};
  if (has_dims) node.args.insert(node.args.end(), {c10::IValue(dims), c10::IValue(sizes)});
  node.args.insert(node.args.end(), model.args.begin() + (has_dims ? 3 : 1), model.args.end());
  return node;
}

}  // namespace tessera::compiler
