#include "tessera/compile/detail/ir/program_agreement.h"

#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/print.h"

#include <sstream>

namespace tessera::compiler {
namespace {

// One line per collective on the group, in order. These lines must be equal on all ranks of the group. Sizes are left
// out, because local shards may be uneven.
std::vector<std::string> collectives_on(const Program& program, int32_t group) {
  std::vector<std::string> lines;
  for (const auto& node : program.nodes) {
    if (kind_of(node) != OpKind::Collective || group_of(node) != group) continue;
    std::ostringstream line;
    line << node.name();
    node.each_read([&](ValueId id) { line << " " << short_name(program[id].type.dtype); });
    for (const auto& arg : node.args)
      if (std::holds_alternative<c10::IValue>(arg)) {
        line << " ";
        print_arg(line, program, arg);
      }
    if (!node.module.empty()) line << "  # " << node.module;
    lines.push_back(line.str());
  }
  return lines;
}

}  // namespace

void agree_on(const Program& program) {
  for (size_t g = 0; g < program.groups.size(); g++)
    if (program.groups[g].group && program.groups[g].group->size() > 1)
      comm::require_same_on_all_ranks(program.groups[g].group, "compile",
                                      collectives_on(program, static_cast<int32_t>(g)));
}

}  // namespace tessera::compiler
