// The text of programs: what a program prints parses to the same program. A program that verify() accepts can be
// analysed: memory, dependencies, lifetimes, bytes of collectives.
#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/collective.h"
#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/program.h"

#include "fuzz_targets.h"

namespace tessera::fuzz {
namespace {

bool is_valid(const compiler::Program& program) {
  try {
    compiler::verify(program);
  } catch (const InternalError&) {
    return false;
  }
  return true;
}

void analyse(const compiler::Program& program) {
  for (const auto bytes : program.buffer_bytes()) require(bytes >= 0, "a buffer of ", bytes, " bytes");
  compiler::lifetimes(program);
  for (const auto order : {compiler::Dependencies::Collectives::InOrder, compiler::Dependencies::Collectives::Any})
    compiler::Dependencies(program, order);
  for (const auto& node : program.nodes)
    if (compiler::kind_of(node) == compiler::OpKind::Collective)
      require(compiler::collective_of(program, node).bytes >= 0, "a collective of negative bytes");
}

}  // namespace

void fuzz_ir(std::string_view input) {
  compiler::Program program;
  try {
    program = compiler::parse(std::string(input));
  } catch (const UsageError&) {
    return;
  }
  compiler::renumber(program);
  const auto text = compiler::text_of(program);
  const auto again = compiler::parse(text);
  require(compiler::text_of(again) == text, "the text is another program:\n", text, "\nafter parse:\n", again);
  const bool valid = is_valid(program);
  require(is_valid(again) == valid, "verify() decides otherwise after printing and parsing:\n", text);
  if (valid) analyse(program);
}

}  // namespace tessera::fuzz
