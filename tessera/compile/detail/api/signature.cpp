#include "tessera/compile/detail/api/signature.h"

#include "tessera/dtensor/detail/meta.h"

#include <algorithm>
#include <bit>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

const void* storage_of(const at::Tensor& t) {
  const auto& local = local_or_self(t);
  return local.has_storage() ? local.storage().unsafeGetStorageImpl() : nullptr;
}

int64_t first_byte(const at::Tensor& t) {
  const auto& local = local_or_self(t);
  return local.storage_offset() * static_cast<int64_t>(local.itemsize());
}

// Index of the first tensor before `i` with the same storage; -1: none.
int alias_of(const Tensors& tensors, size_t i) {
  const auto* storage = tensors[i].defined() ? storage_of(tensors[i]) : nullptr;
  for (size_t j = 0; storage && j < i; j++)
    if (tensors[j].defined() && storage_of(tensors[j]) == storage) return static_cast<int>(j);
  return -1;
}
int64_t bytes_between(const Tensors& tensors, int from, size_t to) {
  return from < 0 ? 0 : first_byte(tensors[to]) - first_byte(tensors[static_cast<size_t>(from)]);
}

bool differs(std::string* why, const std::string& text) {
  if (why) *why = text;
  return false;
}

}  // namespace

Signature::Signature(const CallArguments& arguments, std::vector<bool> number_is_key)
    : thread_state_(ThreadState::now()),
      others_(arguments.others),
      numbers_(arguments.numbers),
      number_is_key_(std::move(number_is_key)),
      strings_(arguments.strings) {
  for (size_t m = 0; m < arguments.modules.size(); m++)
    modules_.emplace_back(*arguments.modules[m], arguments.module_objects[m]);
  for (const auto* optimizer : arguments.optimizers) optimizers_.emplace_back(optimizer, optimizer->generation());
  for (const auto& leaf : arguments.leaves) leaves_.emplace_back(leaf, TensorGuard(leaf));
  for (size_t i = 0; i < arguments.tensors.size(); i++) {
    const auto alias = alias_of(arguments.tensors, i);
    tensors_.push_back({TensorGuard(arguments.tensors[i]), alias, bytes_between(arguments.tensors, alias, i)});
  }
}

bool Signature::is_complete() const {
  return std::all_of(modules_.begin(), modules_.end(), [](const auto& module) { return module.is_complete(); });
}

bool Signature::has_same_objects(const CallArguments& arguments) const {
  const auto is_root = [](const ModuleGuard& guard, const torch::nn::Module* module) { return guard.root() == module; };
  const auto is_leaf = [](const auto& leaf, const at::Tensor& t) { return leaf.first.is_same(t); };
  return std::equal(modules_.begin(), modules_.end(), arguments.modules.begin(), arguments.modules.end(), is_root) &&
         std::equal(leaves_.begin(), leaves_.end(), arguments.leaves.begin(), arguments.leaves.end(), is_leaf);
}

bool Signature::add_to(GuardSnapshot& snapshot) const {
  return std::all_of(modules_.begin(), modules_.end(), [&](const auto& module) { return module.add_to(snapshot); }) &&
         std::all_of(leaves_.begin(), leaves_.end(),
                     [&](const auto& leaf) { return leaf.second.add_to(snapshot, leaf.first); });
}

bool Signature::holds(const CallArguments& arguments, const ThreadState& now, std::string* why,
                      bool state_holds) const {
  if (now != thread_state_) return differs(why, why ? now.difference(thread_state_) : "");
  if (arguments.modules.size() != modules_.size() || arguments.optimizers.size() != optimizers_.size())
    return differs(why, "the number of modules or optimizers among the arguments has changed");
  for (size_t i = 0; i < optimizers_.size(); i++) {
    const auto& [optimizer, generation] = optimizers_[i];
    if (arguments.optimizers[i] != optimizer || optimizer->generation() != generation)
      return differs(why, "the optimizer is another one, or its parameters, state or options were replaced");
  }
  for (size_t m = 0; m < modules_.size() && !state_holds; m++)
    if (!modules_[m].holds(*arguments.modules[m], why)) return false;
  return tensors_hold(arguments, why, state_holds) && leaves_hold(arguments, why);
}

bool Signature::tensors_hold(const CallArguments& arguments, std::string* why, bool leaves_hold) const {
  if (arguments.leaves.size() != leaves_.size() || arguments.tensors.size() != tensors_.size())
    return differs(why, "the number of tensors among the arguments has changed");
  for (size_t i = 0; i < leaves_.size(); i++) {
    if (!arguments.leaves[i].is_same(leaves_[i].first))
      return differs(why, "an argument that requires a gradient is another tensor");
    if (!leaves_hold && !leaves_[i].second.holds(arguments.leaves[i]))
      return differs(why, why ? "a leaf tensor is " + leaves_[i].second.difference(arguments.leaves[i]) : "");
  }
  for (size_t i = 0; i < tensors_.size(); i++) {
    const auto& guard = tensors_[i];
    if (!guard.tensor.holds(arguments.tensors[i]))
      return differs(why,
                     why ? c10::str("tensor argument ", i, " is ", guard.tensor.difference(arguments.tensors[i])) : "");
    const auto alias = alias_of(arguments.tensors, i);
    if (alias != guard.aliases || bytes_between(arguments.tensors, alias, i) != guard.alias_bytes)
      return differs(why,
                     why ? c10::str("tensor argument ", i, " shares memory with other arguments than before") : "");
  }
  return true;
}

bool Signature::leaves_hold(const CallArguments& arguments, std::string* why) const {
  if (arguments.others != others_) {
    if (!why) return false;
    size_t i = 0;
    while (i < others_.size() && i < arguments.others.size() && arguments.others[i] == others_[i]) i++;
    const auto* is = i < arguments.others.size() ? &arguments.others[i] : nullptr;
    const auto* was = i < others_.size() ? &others_[i] : nullptr;
    const auto& leaf = is ? *is : *was;
    *why = c10::str("in argument ", leaf.argument, ", ", text_of(leaf.kind), " has changed");
    const bool shown = leaf.kind == ArgumentLeaf::Kind::Integer || leaf.kind == ArgumentLeaf::Kind::Length;
    if (is && was && is->kind == was->kind && shown) *why += c10::str(" from ", was->bits, " to ", is->bits);
    return false;
  }
  if (arguments.strings != strings_) return differs(why, "a string has changed");
  for (size_t i = 0; i < numbers_.size(); i++)
    if (number_is_key_[i] && std::bit_cast<uint64_t>(arguments.numbers[i]) != std::bit_cast<uint64_t>(numbers_[i]))
      return differs(
          why, why ? c10::str("number ", i, " of the arguments is ", arguments.numbers[i], ", it was ", numbers_[i],
                              "; the step computes with it on the host, so it is a constant of the program "
                              "(pass it to ops unchanged, or as a tensor without dims)")
                   : "");
  return true;
}

}  // namespace tessera::compiler
