#include "tessera/compile/detail/replay/op_kernel.h"

#include <c10/core/DispatchKeySet.h>

#include <map>
#include <mutex>
#include <unordered_map>

namespace tessera::compiler {
namespace {

c10::DispatchKey dispatch_key_of(c10::DeviceType device) {
  return device == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
}

bool is_out_schema(const c10::FunctionSchema& functional, const c10::FunctionSchema& out) {
  const auto &given = functional.arguments(), &taken = out.arguments();
  if (taken.size() != given.size() + functional.returns().size()) return false;
  if (out.returns().size() != functional.returns().size()) return false;
  for (size_t i = 0; i < given.size(); i++)
    if (taken[i].name() != given[i].name() || *taken[i].type() != *given[i].type()) return false;
  for (size_t i = given.size(); i < taken.size(); i++)
    if (!taken[i].is_out() || taken[i].type()->kind() != c10::TypeKind::TensorType) return false;
  return true;
}

const std::vector<c10::OperatorHandle>& overloads_of(const std::string& name) {
  static std::mutex mutex;
  static auto* by_name = new std::map<std::string, std::vector<c10::OperatorHandle>>;
  const std::lock_guard lock(mutex);
  if (by_name->empty())
    for (const auto& each : c10::Dispatcher::singleton().getAllOpNames())
      if (auto op = c10::Dispatcher::singleton().findSchema(each)) (*by_name)[each.name].push_back(*op);
  return (*by_name)[name];
}

}  // namespace

OpKernel op_kernel_for(const c10::OperatorHandle& op, c10::DeviceType device) {
  // getComputedKernelForDispatchKey writes to the op without a lock, and ranks may be threads. So each kernel is looked
  // up once, under a lock.
  static std::mutex mutex;
  static auto* known = new std::map<c10::DispatchKey, std::unordered_map<c10::OperatorName, c10::SafeKernelFunction>>;
  const auto key = dispatch_key_of(device);
  const std::lock_guard lock(mutex);
  auto& of_device = (*known)[key];
  auto found = of_device.find(op.operator_name());
  if (found == of_device.end())
    found = of_device.emplace(op.operator_name(), op.getComputedKernelForDispatchKey(key)).first;
  return {op, found->second, c10::DispatchKeySet(key)};
}

std::optional<c10::OperatorHandle> out_overload(const c10::OperatorHandle& op, c10::DeviceType device) {
  // The out= overloads of mse_loss, huber_loss, ... resize their result to the unreduced size and back.
  if (op.operator_name().name.ends_with("_loss")) return {};
  for (const auto& other : overloads_of(op.operator_name().name))
    if (is_out_schema(op.schema(), other.schema()) && other.hasKernelForDispatchKey(dispatch_key_of(device)))
      return other;
  return {};
}

}  // namespace tessera::compiler
