#include "tessera/testing/detail/sample_maker.h"

#include "tessera/base/error.h"
#include "tessera/testing/detail/op_call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scalar_tensor.h>

#include <functional>

namespace tessera::testing {
namespace {

using at::Tensor;

at::Generator seeded(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

bool contains(const std::string& text, std::initializer_list<const char*> words) {
  for (const auto* word : words)
    if (text.find(word) != std::string::npos) return true;
  return false;
}

// Makes tensor number i of a call.
using MakeTensor = std::function<Tensor(int i, const std::string& kind)>;

Tensor of_kind(const std::string& kind, c10::IntArrayRef sizes) {
  if (kind == "mask") return mask(sizes);
  if (kind == "int") return integers(sizes, 4).add_(1);
  return numbers(sizes);
}

// The value of an argument; std::nullopt: use its default.
std::optional<c10::IValue> make_argument(const std::string& op, const c10::Argument& argument, int& tensors,
                                         const MakeTensor& make) {
  auto type = argument.type()->str();
  const auto& name = argument.name();
  bool integral = contains(op, {"bitwise", "gcd", "lcm", "shift"});
  std::string kind = contains(name, {"condition", "mask"}) ? "mask" : integral ? "int" : "number";
  bool needs_bound = contains(op, {"clamp"}) && name == "min";
  bool without_dims = contains(op, {"masked_fill"}) && name == "value";
  if (without_dims && type == "Tensor") return of_kind(kind, {});
  if (type == "Tensor" || (type == "Tensor?" && needs_bound)) return make(tensors++, kind);
  if (type == "Tensor[]") {
    c10::List<Tensor> list;
    bool steps = name == "state_steps";
    list.push_back(steps ? at::scalar_tensor(3.0, at::kFloat) : make(tensors, kind));
    list.push_back(steps ? at::scalar_tensor(2.0, at::kFloat) : make(tensors, kind).mul(0.5));
    tensors++;
    return list;
  }
  if (type == "Scalar?" && needs_bound) return c10::IValue(0.4);
  if (argument.default_value()) return std::nullopt;
  if (type == "Scalar" || type == "number") return integral ? c10::IValue(2) : c10::IValue(0.5);
  if (type == "Scalar[]" || type == "number[]") {
    c10::impl::GenericList list(c10::NumberType::get());
    list.push_back(0.5);
    list.push_back(1.5);
    return list;
  }
  if (type == "float") return c10::IValue(0.5);
  if (type == "int" || type == "SymInt") return c10::IValue(1);
  if (type == "bool") return c10::IValue(false);
  if (type == "str?") return c10::IValue("floor");
  if (argument.type()->kind() == c10::TypeKind::OptionalType) return c10::IValue();
  TESSERA_FAIL(UsageError, op, ": cannot make a value of type ", type, " for '", name, "'; write a sample");
}

Sample make_sample(const std::string& op, const MakeTensor& make) {
  Sample sample{op, {}, {}};
  const auto& schema = find_op(op).schema();
  int tensors = 0;
  for (const auto& argument : schema.arguments()) {
    auto value = make_argument(op, argument, tensors, make);
    sample.args.push_back(value ? *value : *argument.default_value());
  }
  return sample;
}

int tensor_arguments(const std::string& op) {
  int count = 0;
  for (const auto& argument : find_op(op).schema().arguments()) count += argument.type()->str() == "Tensor";
  return count;
}

}  // namespace

Tensor numbers(c10::IntArrayRef sizes) {
  return at::rand(sizes, seeded(1234 + sizes.size()), at::kDouble).mul_(0.8).add_(0.1);
}
Tensor integers(c10::IntArrayRef sizes, int64_t below) { return at::randint(below, sizes, seeded(99), at::kLong); }
Tensor mask(c10::IntArrayRef sizes) { return numbers(sizes).gt(0.5); }

std::vector<Sample> samples_by_schema(const std::string& op) {
  auto equal_sizes = [](int i, const std::string& kind) {
    auto t = of_kind(kind, {5, 3});
    return kind == "number" ? t.mul(i % 2 ? 1.0 : 0.9) : t;
  };
  auto transposed = [](int, const std::string& kind) { return of_kind(kind, {3, 5}).t(); };
  auto broadcast = [](int i, const std::string& kind) {
    return i == 0 ? of_kind(kind, {2, 5, 3}) : i == 1 ? of_kind(kind, {5, 1}) : of_kind(kind, {3});
  };
  std::vector<Sample> samples = {make_sample(op, equal_sizes)};
  bool lists = contains(op, {"_foreach_", "_fused_"});
  if (lists) return samples;
  samples.push_back(make_sample(op, transposed));
  bool saved = contains(op, {"_backward", "dropout", "_prelu"});  // saved tensors have the sizes of the gradient
  if (tensor_arguments(op) > 1 && !saved) {
    samples.push_back(make_sample(op, broadcast));
    auto plain = [](int i, const std::string& kind) { return i == 1 ? of_kind(kind, {}) : of_kind(kind, {5, 3}); };
    samples.push_back(make_sample(op, plain));
    samples.back().plain_args = {1};
  }
  return samples;
}

}  // namespace tessera::testing
