#include "tessera/dtensor/register.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/detail/own_kernels.h"
#include "tessera/propagate/detail/route.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

namespace tessera {
namespace detail {

void register_hot_kernels(torch::Library& aten, std::unordered_set<std::string>& done);      // hot_kernels.cpp
void register_special_kernels(torch::Library& aten, std::unordered_set<std::string>& done);  // special_kernels.cpp
bool accept_any_data(const at::Tensor& self, const at::Tensor& from);                        // special_kernels.cpp
void register_composite_kernels(torch::Library& aten, torch::Library& aten_autograd,
                                std::unordered_set<std::string>& done);                // composite_kernels.cpp
void register_host_free_kernels(torch::Library& aten, torch::Library& aten_autograd);  // host_free_kernels.cpp

namespace {

constexpr auto kDTensorKey = c10::DispatchKey::PrivateUse3;

// Never destroyed, because kernels must outlive every tensor.
torch::Library& library(const char* ns, c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, ns, key, __FILE__, __LINE__);
}

void register_boxed(torch::Library& lib, const propagate::OpEntry& entry) {
  const auto name = entry.name.substr(entry.name.find("::") + 2);
  lib.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedOpKernel>(entry)));
}

// The fallback for an op of another namespace without a rule: choose() throws an error that explains it.
void dispatch_without_rule(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  dispatch_boxed(propagate::entry_of(op), stack);
}

std::unordered_set<std::string>& own_kernels() {
  static auto* names = new std::unordered_set<std::string>;
  return *names;
}

// LibTorch's code for the out= form of a composite op writes to plain buffers, or to views of the out= argument that
// may be copies here. Its functional form runs instead.
bool runs_functional_form(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& argument) { return argument.is_out(); }) &&
         propagate::functional_form(op).has_value();
}

// Registers every op except composite ones. These decompose above our key into ops that have a kernel here. A kernel
// for a composite op would hide its decomposition from autograd.
void register_everything() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto& aten = library("aten", kDTensorKey);
  std::unordered_set<std::string> done;
  register_special_kernels(aten, done);
  own_kernels() = done;
  register_hot_kernels(aten, done);
  auto& aten_autograd = library("aten", c10::DispatchKey::AutogradPrivateUse3);
  register_composite_kernels(aten, aten_autograd, done);
  register_host_free_kernels(aten, aten_autograd);
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && !runs_functional_form(*op))
      continue;
    const auto& entry = propagate::entry_of(*op);
    if (!done.contains(entry.name)) register_boxed(aten, entry);
  }
  // set_data() may replace a parameter on the meta device by a DTensor or by a tensor with memory. It calls this op at
  // the Meta key, which has a higher priority than ours.
  library("aten", c10::DispatchKey::Meta).impl("_has_compatible_shallow_copy_type", TORCH_FN(accept_any_data));
  aten_autograd.impl("_has_compatible_shallow_copy_type", TORCH_FN(accept_any_data));  // else it is boxed on the way
  library("_", kDTensorKey).fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch_without_rule>());
  // AutogradPrivateUse3 has no fallback, unlike the autograd keys of other backends. This fallback reports, as theirs
  // do, a backward through an op that has no derivative.
  library("_", c10::DispatchKey::AutogradPrivateUse3).fallback(torch::autograd::basicAutogradNotImplementedFallback());
}

}  // namespace

void register_kernels() {
  static std::once_flag once;
  std::call_once(once, register_everything);
}

const std::unordered_set<std::string>& ops_with_own_kernel() {
  register_kernels();
  return own_kernels();
}

}  // namespace detail

namespace {

// Installs the boxed kernel of a custom op with its first rule. aten ops have theirs already.
void install_kernel(std::string_view op) {
  detail::register_kernels();
  if (op.starts_with("aten::")) return;
  const auto dot = op.find('.');
  const auto found = c10::Dispatcher::singleton().findSchema(
      {std::string(op.substr(0, dot)), dot == std::string_view::npos ? "" : std::string(op.substr(dot + 1))});
  TESSERA_CHECK(found, UsageError, "no op has the name ", op,
                "; write the name with namespace and overload, for example aten::add.Tensor");
  TESSERA_CHECK(!found->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd), UsageError, op,
                " is a composite op and uses the rules of the ops it decomposes into; register rules for these");
  const auto& entry = propagate::entry_of(*found);
  const std::string ns(op.substr(0, op.find("::")));
  static auto* bound = new std::unordered_set<std::string>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (bound->insert(entry.name).second) detail::register_boxed(detail::library(ns.c_str(), detail::kDTensorKey), entry);
}

}  // namespace

void register_sharding(std::string_view op, rules::RuleFn rule, ShardingOptions options) {
  install_kernel(op);
  rules::registry().add(op, "user", std::move(rule), options.lists, options.reads_scalars);
}

void register_sharding(std::string_view op, std::vector<rules::Strategy> strategies) {
  TESSERA_CHECK(!strategies.empty(), UsageError, "register_sharding(\"", op,
                "\"): no strategy given; write at least {{Replicate(), ...}, {Replicate()}}");
  register_sharding(op, [strategies = std::move(strategies)](const rules::OpQuery& query) {
    rules::Rule rule;
    rule.strategies = strategies;
    const auto& first = query.tensors.at(0);
    for (size_t i = 0; i < strategies[0].out.size(); i++)
      rule.outs.push_back({Sizes(first.sizes.begin(), first.sizes.end()), {}});
    return rule;
  });
}

void same_as(std::string_view op, std::string_view like) {
  install_kernel(op);
  rules::registry().same_as(op, like);
}

}  // namespace tessera
