#include "tessera/compile/detail/trace/repeated_traces.h"

#include "tessera/base/error.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <sstream>

namespace tessera::compiler {
namespace {

constexpr const char* kKeepStateInTensors =
    "a compiled step runs its host code only once. Counters and the like: keep them in tensors that the step updates "
    "in "
    "place, or pass them as arguments. An optimizer of torch::optim counts its steps on the host: pass it as an "
    "argument "
    "of the step";

// The first line that differs, in both texts.
std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b) {
  std::istringstream first(a), second(b);
  std::string x, y;
  do {
    if (!std::getline(first, x)) x = "the end of the program";
    if (!std::getline(second, y)) y = "the end of the program";
  } while (x == y);
  return {x, y};
}

// Numbers that the step has written into tensors, which the tracer keeps.
std::vector<at::Tensor> constants_of(const Tracer::Result& traced) {
  std::vector<at::Tensor> all;
  for (const auto& input : traced.program.inputs)
    if (input.name.starts_with("constant "))
      all.push_back(traced.owners[static_cast<size_t>(traced.program.buffer_of(input.value))]);
  return all;
}

}  // namespace

void RepeatedTraces::check_captured(const Tracer& tracer) {
  const OpModesOff off;
  const at::NoGradGuard no_grad;
  const auto captured = tracer.captured();
  auto left = tracer.storages_left();
  generators_ = tracer.generators();
  const at::Tensor* assigned = nullptr;
  for (size_t i = 0; i < captured.size(); i++) {
    const auto& now = captured[i];
    const auto found = std::find_if(left_.begin(), left_.end(), [&](const auto& storage) {
      return storage._unsafe_get_target() == now.storage().unsafeGetStorageImpl();
    });
    if (found == left_.end()) continue;
    assigned = &now;
    const auto position = static_cast<size_t>(found - left_.begin());
    if (left.size() != left_.size() || i >= before_.size() || before_[i].sizes() != now.sizes()) continue;
    if (const auto storage = left[position].lock(); storage && storage->nbytes() == now.storage().nbytes())
      at::empty({0}, now.options())
          .set_(c10::Storage(storage), now.storage_offset(), now.sizes(), now.strides())
          .copy_(before_[i]);
  }
  TESSERA_CHECK(
      !assigned, UsageError, "compile: the step assigns a new tensor to a variable that its next call reads, of shape ",
      assigned ? assigned->sizes() : at::IntArrayRef(),
      " (h = y.detach(), or the state of an optimizer of torch::optim). A compiled step does not run its host "
      "code again: write h.copy_(y) under torch::NoGradGuard, or pass h as an argument and return the new "
      "one; pass the optimizer as an argument of the step");
  if (!std::exchange(any_, true))  // aliases: the tracer counts references to captured tensors
    for (const auto& t : captured) before_.push_back(t.variable_data());
  left_ = std::move(left);
}

bool RepeatedTraces::confirms(const Tracer::Result& traced, const std::string& returned) {
  const OpModesOff off;
  auto text = text_of(traced.program);
  if (!returned.empty()) text += "return numbers" + returned;
  auto constants = constants_of(traced);
  if (!text_) {
    text_ = std::move(text);
    constants_ = std::move(constants);
    return false;
  }
  if (text != *text_) {
    const auto [first, second] = first_difference(*text_, text);
    TESSERA_FAIL(
        UsageError,
        "compile: two runs of the step from the same state are different programs, because it depends on state "
        "of the host that it changes. First run:\n  ",
        first, "\nSecond run:\n  ", second, "\n", kKeepStateInTensors);
  }
  for (size_t i = 0; i < constants.size(); i++)
    TESSERA_CHECK(at::equal(constants[i], constants_[i]), UsageError, "compile: the step creates a tensor of shape ",
                  constants[i].sizes(),
                  " from other numbers in every run, because it depends on state of the host that it changes; ",
                  kKeepStateInTensors);
  return true;
}

}  // namespace tessera::compiler
