#include "tessera/dtensor/register.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/dispatch.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_set>

namespace tessera {
namespace detail {

void register_hot_kernels(torch::Library& aten, std::unordered_set<std::string>& done);      // hot_kernels.cpp
void register_special_kernels(torch::Library& aten, std::unordered_set<std::string>& done);  // special_kernels.cpp
void register_composite_kernels(torch::Library& aten, torch::Library& aten_autograd,
                                std::unordered_set<std::string>& done);  // composite_kernels.cpp

namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse3;

// Libraries are never destroyed: kernels must outlive every tensor.
torch::Library& library(const char* ns, c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, ns, key, __FILE__, __LINE__);
}

void register_boxed(torch::Library& lib, const propagate::OpEntry& entry) {
  const auto name = entry.name.substr(entry.name.find("::") + 2);
  lib.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedOpKernel>(entry)));
}

// An op of another namespace with neither rule nor kernel of ours.
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  dispatch_boxed(propagate::entry_of(op), stack);
}

// Every op but the composite ones: those decompose above us, into ops that come here. (A kernel of ours for one of
// them would take its autograd formula away.)
void register_everything() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto& aten = library("aten", kKey);
  std::unordered_set<std::string> done;
  register_special_kernels(aten, done);
  register_hot_kernels(aten, done);
  register_composite_kernels(aten, library("aten", c10::DispatchKey::AutogradPrivateUse3), done);
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    const auto& entry = propagate::entry_of(*op);
    if (!done.contains(entry.name)) register_boxed(aten, entry);
  }
  // A parameter on the meta device may be given a distributed tensor, or a real one, in its place: the Meta key
  // outranks ours, so that set_data asks there.
  library("aten", c10::DispatchKey::Meta)
      .impl("_has_compatible_shallow_copy_type", [](const at::Tensor&, const at::Tensor&) { return true; });
  library("_", kKey).fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
  // AutogradPrivateUse3 has no fallback of its own, unlike the other backends'. This one tells, as theirs do, when a
  // gradient is asked of an op that has none.
  library("_", c10::DispatchKey::AutogradPrivateUse3).fallback(torch::autograd::basicAutogradNotImplementedFallback());
}

}  // namespace

void register_kernels() {
  static std::once_flag once;
  std::call_once(once, register_everything);
}

}  // namespace detail

namespace {

// A user's op gets our kernel with its first rule; aten's have one from the start.
void bind(std::string_view op) {
  detail::register_kernels();
  if (op.starts_with("aten::")) return;
  const auto dot = op.find('.');
  const auto found = c10::Dispatcher::singleton().findSchema(
      {std::string(op.substr(0, dot)), dot == std::string_view::npos ? "" : std::string(op.substr(dot + 1))});
  TESSERA_CHECK(found, UsageError, "no op is called ", op,
                "; names are written with namespace and overload, as in aten::add.Tensor");
  TESSERA_CHECK(!found->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd), UsageError, op,
                " is made of other ops and follows their rules; a rule of its own would take its gradient away");
  const auto& entry = propagate::entry_of(*found);
  const std::string ns(op.substr(0, op.find("::")));
  static auto* bound = new std::unordered_set<std::string>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (bound->insert(entry.name).second) detail::register_boxed(detail::library(ns.c_str(), detail::kKey), entry);
}

}  // namespace

void register_sharding(std::string_view op, rules::RuleFn rule, ShardingOptions options) {
  bind(op);
  rules::registry().add(op, "user", std::move(rule), options.lists, options.reads_scalars);
}

void register_sharding(std::string_view op, std::vector<rules::Row> rows) {
  TESSERA_CHECK(!rows.empty(), UsageError, "register_sharding(\"", op,
                "\"): no row given; write at least {{R, ...}, {R}}");
  register_sharding(op, [rows = std::move(rows)](const rules::OpQuery& query) {
    rules::Rule rule;
    rule.rows = rows;
    const auto& first = query.tensors.at(0);
    for (size_t i = 0; i < rows[0].out.size(); i++)
      rule.outs.push_back({Sizes(first.sizes.begin(), first.sizes.end()), {}});
    return rule;
  });
}

void same_as(std::string_view op, std::string_view like) {
  bind(op);
  rules::registry().same_as(op, like);
}

}  // namespace tessera
