#include "tessera/dtensor/register.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch.h"

#include <torch/library.h>

#include <mutex>
#include <unordered_set>

namespace tessera {
namespace detail {

void register_hot_kernels(torch::Library& aten, std::unordered_set<std::string>& done);      // hot_kernels.cpp
void register_special_kernels(torch::Library& aten, std::unordered_set<std::string>& done);  // special_kernels.cpp
void register_composite_kernels(torch::Library& aten_autograd);                              // composite_kernels.cpp

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
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    const auto& entry = propagate::entry_of(*op);
    if (!done.contains(entry.name)) register_boxed(aten, entry);
  }
  library("_", kKey).fallback(torch::CppFunction::makeFromBoxedFunction<&refuse>());
  // AutogradPrivateUse3 has no fallback of its own, unlike the other backends'.
  register_composite_kernels(library("aten", c10::DispatchKey::AutogradPrivateUse3));
  library("_", c10::DispatchKey::AutogradPrivateUse3).fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace

void register_kernels() {
  static std::once_flag once;
  std::call_once(once, register_everything);
}

}  // namespace detail

void register_sharding(std::string_view op, rules::RuleFn rule) {
  detail::register_kernels();
  rules::registry().add(op, "user", std::move(rule));
  if (op.rfind("aten::", 0) == 0) return;
  const auto& entry = propagate::entry_of(op);
  const std::string ns(op.substr(0, op.find("::")));
  static auto* bound = new std::unordered_set<std::string>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (bound->insert(entry.name).second) detail::register_boxed(detail::library(ns.c_str(), detail::kKey), entry);
}

void register_sharding(std::string_view op, std::vector<rules::Row> rows) {
  TESSERA_CHECK(!rows.empty(), UsageError, "register_sharding(\"", op, "\"): no row given; write at least {{R, ...}, {R}}");
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
  const auto* rule = rules::registry().find(like);
  TESSERA_CHECK(rule, UsageError, "same_as(\"", op, "\", \"", like, "\"): ", like, " has no rule");
  register_sharding(op, rule->fn);
}

}  // namespace tessera
