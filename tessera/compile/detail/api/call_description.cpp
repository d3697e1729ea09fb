#include "tessera/compile/detail/api/call_description.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/api/tensor_guard.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/nn/hooks.h"
#include "tessera/optim/optimizer.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <unordered_map>

namespace tessera::compiler {
namespace {

class CallDescription {
 public:
  explicit CallDescription(const CallArguments& arguments) : arguments_(arguments) {
    for (const auto& [tensor, role, name] : lift(arguments))
      if (tensor.defined()) names_.emplace(tensor.unsafeGetTensorImpl(), name);
  }

  std::vector<std::string> lines(const std::vector<bool>& number_is_key) {
    for (const auto* module : arguments_.modules) add_module(*module, "module");
    for (auto* optimizer : arguments_.optimizers) add_optimizer(*optimizer);
    for (size_t i = 0; i < arguments_.tensors.size(); i++) add_tensor(i);
    for (const auto& [kind, argument, bits] : arguments_.others) {
      TESSERA_CHECK(kind != ArgumentLeaf::Kind::Generator || bits == 0, UsageError,
                    "a saved step cannot have a random generator among its arguments; argument ", argument, " has one");
      add("in argument ", argument, ", ", text_of(kind), ": ", bits);
    }
    for (const auto& text : arguments_.strings) add("string: \"", without_newlines(text), "\"");
    for (size_t i = 0; i < arguments_.numbers.size(); i++)
      if (number_is_key[i])
        add("number ", i, ": ", arguments_.numbers[i], " ", std::bit_cast<uint64_t>(arguments_.numbers[i]));
    if (arguments_.describe_result) add("result: ", arguments_.describe_result());
    return std::move(lines_);
  }

 private:
  template <class... Parts>
  void add(const Parts&... parts) {
    lines_.push_back(c10::str(parts...));
  }
  static std::string without_newlines(std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
  }
  const std::string& name_of(const at::Tensor& t) const { return names_.at(t.unsafeGetTensorImpl()); }

  static std::string describe(const std::string& what, const at::Tensor& t) {
    TESSERA_CHECK(!is_dtensor(t), UsageError, "a saved step runs on one rank; ", what, " is distributed");
    return TensorGuard::describe(t);
  }

  static size_t hooks_of(const torch::nn::Module& module) {
    const auto* point = dynamic_cast<const HookPoint*>(&module);
    const auto* hooks = point ? point->hooks() : nullptr;
    if (!hooks) return 0;
    return hooks->forward_pre.entries().size() + hooks->forward.entries().size() + hooks->around.entries().size() +
           hooks->backward_pre.entries().size() + hooks->backward.entries().size();
  }

  // The class and its options (pretty_print), mode, hooks, tensors, submodules.
  void add_module(const torch::nn::Module& module, const std::string& path) {
    std::ostringstream text;
    module.pretty_print(text);
    add(path, ": ", without_newlines(text.str()), module.is_training() ? "" : " in eval mode", ", ", hooks_of(module),
        " hooks");
    for (const auto& item : module.named_parameters(false)) add_tensor_of(path + "." + item.key(), item.value());
    for (const auto& item : module.named_buffers(false)) add_tensor_of(path + "." + item.key(), item.value());
    for (const auto& item : module.named_children())
      if (item.value()) add_module(*item.value(), path + "." + item.key());
  }
  void add_tensor_of(const std::string& path, const at::Tensor& t) {
    add(path, ": ", describe(path, t), t.defined() ? " named " + name_of(t) : "");
  }

  // Options without the learning rate, which the program reads in each run.
  void add_optimizer(OptimizerAccess& optimizer) {
    const auto* own = dynamic_cast<const optim::Optimizer*>(&optimizer);
    const auto groups = optimizer.groups();
    for (size_t g = 0; g < groups.size(); g++) {
      std::ostringstream text;
      text.precision(17);
      for (const auto& [name, value] : optimizer.options(g)) {
        if (name == "lr") continue;
        text << " " << name;
        const auto numbers = value.to(at::kDouble).flatten();
        for (int64_t i = 0; i < numbers.numel(); i++) text << " " << numbers[i].item<double>();
      }
      add("optimizer ", optimizer.kind(), ", group ", g, ":", text.str(), own && own->is_fused(g) ? ", fused" : "");
      for (const auto& parameter : groups[g]) add("of group ", g, ": ", name_of(parameter));
    }
  }

  void add_tensor(size_t i) {
    const auto what = c10::str("tensor argument ", i);
    const auto& t = arguments_.tensors[i];
    std::string shared;
    for (size_t j = 0; j < i && shared.empty() && t.defined() && t.has_storage(); j++) {
      const auto& other = arguments_.tensors[j];
      if (other.defined() && other.is_alias_of(t))
        shared = c10::str(" in the memory of argument ", j, " at byte ",
                          t.storage_offset() * static_cast<int64_t>(t.itemsize()) -
                              other.storage_offset() * static_cast<int64_t>(other.itemsize()));
    }
    add(what, ": ", describe(what, t), shared);
  }

  const CallArguments& arguments_;
  std::unordered_map<const void*, std::string> names_;
  std::vector<std::string> lines_;
};

}  // namespace

std::vector<std::string> describe_call(const CallArguments& arguments, const std::vector<bool>& number_is_key) {
  return CallDescription(arguments).lines(number_is_key);
}

std::string difference_of_calls(const std::vector<std::string>& now, const std::vector<std::string>& saved) {
  size_t i = 0;
  while (i < now.size() && i < saved.size() && now[i] == saved[i]) i++;
  if (i == now.size() && i == saved.size()) return "";
  const auto line = [&](const auto& lines) { return i < lines.size() ? lines[i] : std::string("nothing"); };
  return c10::str("the call has \"", line(now), "\", the saved program has \"", line(saved), "\"");
}

}  // namespace tessera::compiler
