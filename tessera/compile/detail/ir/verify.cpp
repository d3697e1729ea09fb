#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/collective.h"
#include "tessera/compile/detail/ir/inflight_collectives.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/print.h"
#include "tessera/compile/detail/ir/program.h"
#include "tessera/compile/detail/ir/schema_match.h"

#include <sstream>

namespace tessera::compiler {
namespace {

class Verifier {
 public:
  explicit Verifier(const Program& program)
      : program_(program),
        defined_(program.values.size(), 0),
        constant_(static_cast<size_t>(program.buffers), 0),
        bytes_(static_cast<size_t>(program.buffers), -1) {}

  void run() {
    for (const auto& input : program_.inputs) {
      define(input.value);
      if (input.role == Role::Constant) constant_[static_cast<size_t>(program_.buffer_of(input.value))] = 1;
    }
    for (const auto& node : program_.nodes) {
      node_ = &node;
      check_node(node);
    }
    node_ = nullptr;
    for (const auto& output : program_.outputs) {
      if (output.value == kNone) continue;
      check_defined(output.value);
      check(!inflight_.writes(program_.buffer_of(output.value)), "%", output.value,
            " is an output, and its collective is not waited for");
    }
  }

 private:
  template <class... Message>
  void check(bool ok, const Message&... message) const {
    if (C10_LIKELY(ok)) return;
    std::ostringstream line;
    if (node_) print_node(line, program_, *node_);
    TESSERA_FAIL(InternalError, "program: ", message..., node_ ? "\n  " : "", line.str());
  }

  bool exists(ValueId id) const { return id >= 0 && static_cast<size_t>(id) < defined_.size(); }
  void check_defined(ValueId id) const {
    check(exists(id) && defined_[static_cast<size_t>(id)], "%", id, " is used before its definition");
  }

  void define(ValueId id) {
    check(exists(id), "%", id, " does not exist");
    auto& defined = defined_[static_cast<size_t>(id)];
    check(!defined, "%", id, " is defined twice");
    defined = 1;
    const auto& value = program_[id];
    check(value.buffer >= 0 && value.buffer < program_.buffers, "%", id, " has no buffer");
    const auto error = type_error(value.type);
    check(error.empty(), "%", id, " is not the type of a tensor: ", error);
    const auto ndim = static_cast<int64_t>(value.type.sizes.size());
    check(value.batch_dim < ndim, "%", id, " has batch dim ", value.batch_dim, " of ", ndim, " dims");
    // The first value of a buffer defines its size. In an external buffer the first value may be a view.
    auto& bytes = bytes_[static_cast<size_t>(value.buffer)];
    int64_t end = 0;
    const bool fits = value.offset >= 0 && !__builtin_add_overflow(value.offset, value.type.span(), &end) &&
                      !__builtin_mul_overflow(end, value.type.itemsize(), &end);
    check(fits, "%", id, " has offset ", value.offset);
    if (value.type.numel() == 0) end = 0;
    if (bytes < 0 || !node_)
      bytes = std::max(bytes, end);
    else
      check(end <= bytes || external(value.buffer), "%", id, " ends at byte ", end, " of a buffer of ", bytes,
            " bytes");
  }
  bool external(int32_t buffer) const {
    for (const auto& input : program_.inputs)
      if (program_.buffer_of(input.value) == buffer) return true;
    return false;
  }

  void check_node(const Node& node) {
    const auto& schema = node.schema();
    check(node.args.size() == schema.arguments().size(), node.args.size(), " arguments for a schema of ",
          schema.arguments().size());
    check(node.results.size() == schema.returns().size(), node.results.size(), " results for a schema of ",
          schema.returns().size());
    for (size_t i = 0; i < node.args.size(); i++)
      check(argument_fits(node.args[i], *schema.arguments()[i].type()), "argument ", schema.arguments()[i].name(),
            " does not match the schema, ", schema);
    for (size_t i = 0; i < node.results.size(); i++)
      check(result_fits(node.results[i], *schema.returns()[i].type()), "result ", i, " does not match the schema, ",
            schema);
    node.each_read([&](ValueId id) { check_defined(id); });
    const auto kind = kind_of(node);
    if (kind != OpKind::Wait)
      node.each_read([&](ValueId id) {
        check(!inflight_.writes(program_.buffer_of(id)), "%", id, " is read before the wait for its collective");
      });
    node.each_write([&](ValueId id) {
      check(!constant_[static_cast<size_t>(program_.buffer_of(id))], "%", id,
            " is a constant, and the op writes to it");
      check(kind == OpKind::Wait || !inflight_.uses(program_.buffer_of(id)), "%", id,
            " is written while a collective uses it");
    });
    if (is_generated(node))
      check(program_.kernels.count(generated_name(node)) > 0, "the program has no kernel of that name");
    if (kind == OpKind::Collective || kind == OpKind::Wait) check(group_of(node) >= 0, "the op has no group argument");
    if (kind == OpKind::Collective) {
      const auto wrong = collective_error(program_, node);
      check(wrong.empty(), wrong);
    }
    node.each_result([&](ValueId id) { define(id); });
    if (kind == OpKind::Collective) inflight_.post(program_, node);
    if (kind == OpKind::Wait) inflight_.wait(program_, node);
  }

  const Program& program_;
  std::vector<char> defined_, constant_;
  std::vector<int64_t> bytes_;
  InFlightCollectives inflight_;
  const Node* node_ = nullptr;
};

}  // namespace

void verify(const Program& program) { Verifier(program).run(); }

}  // namespace tessera::compiler
