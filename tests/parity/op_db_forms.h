#pragma once
#include "op_db_replay.h"

#include "tessera/dtensor/dtensor.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <map>
#include <random>

// In-place and out= forms of the ops of a program.
namespace tessera::parity {

enum class Form { Functional, InPlace, Out, Compiled };

// The op with the same arguments that writes its first one, or that writes its results to out= arguments.
inline std::optional<c10::OperatorHandle> other_form(const c10::OperatorHandle& op, Form form) {
  static const auto* by_name = [] {
    auto* all = new std::map<std::string, std::vector<c10::OperatorHandle>>;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames())
      if (const auto found = dispatcher.findSchema(name)) (*all)[name.name].push_back(*found);
    return all;
  }();
  const auto& arguments = op.schema().arguments();
  const auto found = by_name->find(op.operator_name().name + (form == Form::InPlace ? "_" : ""));
  if (found == by_name->end() || arguments.empty()) return std::nullopt;
  for (const auto& other : found->second) {
    std::vector<const c10::Argument*> own;
    size_t outs = 0;
    for (const auto& argument : other.schema().arguments()) argument.is_out() ? void(outs++) : own.push_back(&argument);
    const bool same =
        std::equal(own.begin(), own.end(), arguments.begin(), arguments.end(),
                   [](const auto* a, const auto& b) { return a->name() == b.name() && *a->type() == *b.type(); });
    if (same && outs == (form == Form::Out ? op.schema().returns().size() : 0)) return other;
  }
  return std::nullopt;
}

// Runs a node in another form, on plain tensors and on distributed ones. Returns false, and has no effect, if there is
// no such form, or if it does not accept the plain tensors.
class FormRunner {
 public:
  FormRunner(Form form, const DeviceMesh& mesh, unsigned seed) : form_(form), mesh_(mesh), random_(seed) {}

  bool run(const Json& node, Replay& plain, Replay& distributed) {
    if (node.at("op").text() == "getitem") return false;
    const auto op = testing::find_op(node.at("op").text());
    const auto other = other_form(op, form_);
    if (!other) return false;
    auto wanted = plain.arguments(node, op);
    op.callBoxed(wanted);
    if (!std::all_of(wanted.begin(), wanted.end(),
                     [](const auto& v) { return v.isTensor() && v.toTensor().defined(); }))
      return false;
    auto on_plain = plain.arguments(node, op), on_distributed = distributed.arguments(node, op);
    if (form_ == Form::InPlace) {
      if (!can_hold(on_plain[0], wanted[0].toTensor()) || !is_dtensor(on_distributed[0].toTensor())) return false;
      for (auto* stack : {&on_plain, &on_distributed}) (*stack)[0] = (*stack)[0].toTensor().clone();
    } else {
      if (!any_dtensor(on_distributed)) return false;
      for (const auto& result : wanted) {
        const auto out = at::zeros_like(result.toTensor(), at::MemoryFormat::Contiguous);
        on_plain.emplace_back(out);
        on_distributed.emplace_back(at::Tensor(distribute_tensor(out, mesh_, placements_of(out))));
      }
    }
    try {
      other->callBoxed(on_plain);
    } catch (const std::exception&) {
      return false;
    }
    other->callBoxed(on_distributed);
    plain.add_results(on_plain);
    distributed.add_results(on_distributed);
    return true;
  }

 private:
  static bool can_hold(const IValue& self, const at::Tensor& result) {
    return self.isTensor() && self.toTensor().defined() && self.toTensor().sizes() == result.sizes() &&
           self.toTensor().scalar_type() == result.scalar_type();
  }
  static bool any_dtensor(const torch::jit::Stack& stack) {
    return std::any_of(stack.begin(), stack.end(), [](const auto& value) {
      if (value.isTensor()) return is_dtensor(value.toTensor());
      if (!value.isTensorList()) return false;
      const auto list = value.toTensorVector();
      return std::any_of(list.begin(), list.end(), [](const auto& t) { return is_dtensor(t); });
    });
  }
  Placements placements_of(const at::Tensor& t) {
    Placements placements;
    for (int64_t axis = 0; axis < mesh_.ndim(); axis++) {
      const auto d = static_cast<int64_t>(random_() % static_cast<unsigned>(t.dim() + 1));
      placements.push_back(d == t.dim() ? Replicate() : Shard(d));
    }
    return placements;
  }

  Form form_;
  DeviceMesh mesh_;
  std::minstd_rand random_;
};

}  // namespace tessera::parity
