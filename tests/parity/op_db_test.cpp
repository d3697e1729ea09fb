// PyTorch's operator database on distributed tensors. tests/parity/op_db.py dumped each sample as an ATen program with
// its inputs, results and gradients; here the programs run on DTensors with many placements, on uneven and empty
// shards, with autograd above them.
#include "tessera/base/detail/json.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"
#include "tessera/testing/detail/op_call.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>

namespace tessera::parity {
namespace {

using c10::IValue;
using c10::TypeKind;

// ---- the file ----

struct OpDb {
  Json json;
  dcp::SafetensorsFile file;

  explicit OpDb(const std::string& folder)
      : json(Json::parse(read_text_file(folder + "/op_db.json", "the programs"), "op_db.json")),
        file(folder + "/op_db.safetensors") {}

  // A copy, or an undefined tensor.
  at::Tensor tensor(size_t program, char kind, size_t i) const {
    const auto name = c10::str(program, ".", kind, i);
    if (const auto* entry = file.find(name)) return file.tensor(*entry).clone();
    const auto* complex = file.find(name + "c");  // real and imaginary parts
    return complex ? at::view_as_complex(file.tensor(*complex).clone()) : at::Tensor();
  }
};

// ---- arguments ----

IValue number_of(const Json& json) {
  if (const auto* b = json.get_if<bool>()) return *b;
  if (const auto* i = json.get_if<int64_t>()) return *i;
  if (const auto* d = json.get_if<double>()) return *d;
  if (const auto* special = json.find("float"))
    return special->text() == "nan" ? std::numeric_limits<double>::quiet_NaN()
                                    : (special->text()[0] == '-' ? -1 : 1) * std::numeric_limits<double>::infinity();
  if (const auto* complex = json.find("complex")) {
    const auto part = [&](size_t i) {
      const auto& item = complex->items()[i];
      const auto* d = item.get_if<double>();
      return d ? *d : static_cast<double>(item.number());
    };
    return c10::complex<double>(part(0), part(1));
  }
  return json.at("int").number();
}

double real_of(const Json& json) {
  const auto value = number_of(json);
  return value.isInt() ? static_cast<double>(value.toInt()) : value.isBool() ? value.toBool() : value.toDouble();
}

class Replay {
 public:
  explicit Replay(std::vector<IValue> inputs) : values_(std::move(inputs)) {}

  void run(const Json& node) {
    const auto& op = node.at("op").text();
    if (op == "getitem") {
      const auto& items = node.at("args").items();
      const auto& list = values_[items[0].at("v").number()];
      const auto i = static_cast<size_t>(items[1].number());
      values_.push_back(list.isTuple() ? list.toTupleRef().elements()[i] : list.toListRef()[i]);
      return;
    }
    const auto handle = testing::find_op(op);
    torch::jit::Stack stack;
    for (const auto& argument : handle.schema().arguments()) {
      const auto* given = node.at("args").find(argument.name());
      stack.push_back(given ? value_of(*given, argument.real_type()) : *argument.default_value());
    }
    handle.callBoxed(stack);
    if (stack.size() == 1)
      values_.push_back(stack[0]);
    else
      values_.emplace_back(c10::ivalue::Tuple::create(std::vector<IValue>(stack.begin(), stack.end())));
  }

  const IValue& value(int64_t id) const { return values_[static_cast<size_t>(id)]; }

 private:
  IValue value_of(const Json& json, const c10::TypePtr& type) const {
    if (const auto* id = json.find("v")) return values_[id->number()];
    if (json.get_if<std::nullptr_t>()) return {};
    if (const auto* device = json.find("device")) return c10::Device(device->text());
    if (const auto optional = type->cast<c10::OptionalType>()) return value_of(json, optional->getElementType());
    if (const auto list = type->cast<c10::ListType>()) return list_of(json, list->getElementType());
    switch (type->kind()) {
      case TypeKind::TensorType: {  // a number
        const auto value = number_of(json);
        auto scalar = at::scalar_to_tensor(value.toScalar());
        scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
        return scalar;
      }
      case TypeKind::FloatType:
        return real_of(json);
      case TypeKind::StringType:
        return json.text();
      default:
        if (const auto* text = json.get_if<std::string>()) return *text;
        return number_of(json);
    }
  }

  IValue list_of(const Json& json, const c10::TypePtr& element) const {
    const auto* items = json.get_if<Json::Array>();
    const Json::Array one = items ? *items : Json::Array{json};  // int[2] accepts one int
    if (element->kind() == TypeKind::TensorType) {
      c10::List<at::Tensor> list;
      for (const auto& item : one) list.push_back(value_of(item, element).toTensor());
      return list;
    }
    if (const auto optional = element->cast<c10::OptionalType>();
        optional && optional->getElementType()->kind() == TypeKind::TensorType) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& item : one) {
        const auto value = value_of(item, element);
        list.push_back(value.isTensor() ? std::optional(value.toTensor()) : std::nullopt);
      }
      return list;
    }
    if (element->kind() == TypeKind::BoolType) {
      c10::List<bool> list;
      for (const auto& item : one) list.push_back(number_of(item).toBool());
      return list;
    }
    if (element->kind() == TypeKind::FloatType) {
      c10::List<double> list;
      for (const auto& item : one) list.push_back(real_of(item));
      return list;
    }
    if (element->kind() == TypeKind::NumberType) {
      c10::impl::GenericList list(c10::NumberType::get());
      for (const auto& item : one) list.push_back(number_of(item));
      return list;
    }
    std::vector<int64_t> list;
    for (const auto& item : one) list.push_back(number_of(item).toInt());
    return list;
  }

  std::vector<IValue> values_;
};

// ---- one program ----

at::Tensor cotangent(const at::Tensor& t) {
  return at::linspace(0.5, 1.5, t.numel(), at::kDouble).to(t.scalar_type()).reshape(t.sizes());
}

at::Tensor plain_of(const at::Tensor& t) {
  const auto value = t.detach();
  return (is_dtensor(value) ? DTensor(value).full_tensor() : value).resolve_conj().resolve_neg();
}

std::string difference(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  const auto x = plain_of(found);
  if (x.sizes() != expected.sizes()) return c10::str(what, " has sizes ", x.sizes(), ", PyTorch's ", expected.sizes());
  if (x.scalar_type() != expected.scalar_type())
    return c10::str(what, " is ", x.scalar_type(), ", PyTorch's ", expected.scalar_type());
  if (x.numel() == 0 || at::allclose(x, expected, 5e-4, 2e-4, /*equal_nan=*/true)) return "";
  const auto off = x.sub(expected).abs().to(at::kDouble);
  return c10::str(what, " differs from PyTorch's by up to ", off.max().item<double>(), "; its largest value is ",
                  expected.abs().to(at::kDouble).max().item<double>());
}

enum class Spread { Replicated, Dim0, Dim1, LastDim, Random };
constexpr const char* kSpreadNames[] = {"R", "S(0)", "S(1)", "S(-1)", "random placements"};

Placement place(const at::Tensor& t, Spread spread, std::minstd_rand& random) {
  if (t.dim() == 0) return Replicate();
  switch (spread) {
    case Spread::Replicated:
      return Replicate();
    case Spread::Dim0:
      return Shard(0);
    case Spread::Dim1:
      return t.dim() > 1 ? Shard(1) : Replicate();
    case Spread::LastDim:
      return Shard(t.dim() - 1);
    case Spread::Random: {
      const auto d = static_cast<int64_t>(random() % static_cast<unsigned>(t.dim() + 1));
      return d == t.dim() ? Replicate() : Shard(d);
    }
  }
  return Replicate();
}

// Runs the program on this rank. Returns what differs, or "".
std::string replay(const OpDb& db, size_t number, const DeviceMesh& mesh, Spread spread) {
  const auto& program = db.json.at("programs").items()[number];
  std::minstd_rand random(static_cast<unsigned>(number) + 1);
  const auto inputs = static_cast<size_t>(program.at("inputs").number());
  const auto all = inputs + static_cast<size_t>(program.at("constants").number());
  const auto& wants = program.at("grad").items();
  std::vector<at::Tensor> leaves;
  std::vector<IValue> values;
  for (size_t i = 0; i < all; i++) {
    auto t = db.tensor(number, 'i', i);
    if (const auto* strides = program.find("strides"))
      if (const auto* own = strides->find(c10::str("i", i)))
        t = at::empty_strided(t.sizes(), own->numbers(), t.options()).copy_(t);
    const bool wants_grad = i < inputs && *wants[i].get_if<bool>();
    at::Tensor x = distribute_tensor(t, mesh, {place(t, i < inputs ? spread : Spread::Replicated, random)});
    if (wants_grad) x.set_requires_grad(true);
    leaves.push_back(x);
    values.emplace_back(wants_grad ? x * 1 : x);
  }
  std::optional<ImplicitReplication> plain_is_replicated;
  if (*program.at("makes_tensors").get_if<bool>()) plain_is_replicated.emplace();
  Replay run(std::move(values));
  for (const auto& node : program.at("nodes").items()) run.run(node);

  if (const auto* value = program.find("value")) {
    const auto found = run.value(static_cast<int64_t>(all)).toScalar(), expected = number_of(*value).toScalar();
    return std::abs(found.toComplexDouble() - expected.toComplexDouble()) < 1e-5 ? "" : "another value";
  }
  std::vector<at::Tensor> through, cotangents;
  const bool is_random = *program.at("random").get_if<bool>();
  const auto& outputs = program.at("outputs").items();
  for (size_t i = 0; i < outputs.size(); i++) {
    const auto found = run.value(outputs[i].number()).toTensor();
    const auto expected = db.tensor(number, 'o', i);
    if (is_random && found.sizes() != expected.sizes()) return "another size";
    if (!is_random)
      if (auto why = difference(found, expected, c10::str("result ", i)); !why.empty()) return why;
    if (!found.requires_grad()) continue;
    through.push_back(found);
    const auto seed = cotangent(expected);
    cotangents.push_back(is_dtensor(found) ? at::Tensor(distribute_tensor(seed, mesh, {Replicate()})) : seed);
  }
  const auto& has_grad = program.at("has_grad").items();
  const bool any =
      std::any_of(has_grad.begin(), has_grad.end(), [](const auto& g) { return *g.template get_if<bool>(); });
  if (!any || is_random) return "";
  torch::autograd::backward(through, cotangents);
  for (size_t i = 0; i < inputs; i++) {
    if (!*has_grad[i].get_if<bool>()) continue;
    if (!leaves[i].grad().defined()) return c10::str("input ", i, " has no gradient");
    if (auto why = difference(leaves[i].grad(), db.tensor(number, 'g', i), c10::str("the gradient of input ", i));
        !why.empty())
      return why;
  }
  return "";
}

// The first line, or the line of the first rank that failed.
std::string first_line_of(const std::exception& e) {
  const auto* ours = dynamic_cast<const c10::Error*>(&e);
  std::string text = ours ? ours->what_without_backtrace() : e.what();
  if (const auto rank = text.find("(the first to fail): "); rank != std::string::npos) text = text.substr(rank + 21);
  return text.substr(0, std::min<size_t>(text.find('\n'), 300));
}

// Entries that do not pass, and why.
std::map<std::string, std::string> failures(const OpDb& db, const std::vector<int64_t>& worlds,
                                            const std::vector<Spread>& spreads) {
  std::map<std::string, std::string> failed;
  const auto& programs = db.json.at("programs").items();
  const char* only = std::getenv("TESSERA_OP_DB_ENTRY");
  for (size_t p = 0; p < programs.size(); p++) {
    const auto& name = programs[p].at("name").text();
    if (only && name != only) continue;
    for (auto n : worlds)
      for (auto spread : spreads) {
        if (failed.contains(name) && !only) continue;
        std::string why;
        try {
          std::vector<std::string> found(static_cast<size_t>(n));
          testing::run_ranks(n,
                             [&](testing::Rank& me) {
                               found[static_cast<size_t>(me.rank)] =
                                   replay(db, p, init_device_mesh("cpu", {n}, {"x"}), spread);
                             },
                             {.timeout = std::chrono::seconds(20)});
          for (const auto& each : found)
            if (!each.empty()) why = each;
        } catch (const std::exception& e) {
          why = first_line_of(e);
        }
        if (!why.empty()) {
          failed[name] = c10::str(kSpreadNames[static_cast<int>(spread)], " on ", n, " ranks: ", why);
          if (only) std::cout << name << "  " << failed[name] << "\n";
        }
      }
  }
  return failed;
}

// Entries that do not run here, and why.
const std::map<std::string, std::string>& exceptions() {
  static const std::map<std::string, std::string> names = {
      {"nn.functional.linear_cross_entropy.chunked", "an op that Python defines"},
      {"nn.functional.linear_cross_entropy.chunked_none", "an op that Python defines"},
      {"resize_", "changes the memory of its argument"},
      {"resize_as_", "changes the memory of its argument"},
  };
  return names;
}

TEST(OpDb, EntriesRunOnDistributedTensors) {
  at::set_num_threads(1);
  const char* folder = std::getenv("TESSERA_OP_DB");  // another dump, as `make parity-ops` makes it
  const OpDb db(folder ? folder : TESSERA_PARITY_SCRIPTS "/op_db");
  auto failed = failures(db, {2}, {Spread::Replicated, Spread::Dim0, Spread::Dim1, Spread::LastDim, Spread::Random});
  for (const auto& [name, why] : failures(db, {4}, {Spread::Dim0, Spread::Random})) failed.emplace(name, why);
  for (const auto& [name, why] : failed) {
    std::cout << "  " << name << "  " << why << "\n";
    EXPECT_TRUE(exceptions().contains(name)) << name << "  " << why;
  }
  const auto& skipped = db.json.at("skipped").members();
  for (const auto& [name, why] : skipped) std::cout << "  " << name << "  no program: " << why.text() << "\n";
  const auto entries = db.json.at("entries").number();
  const auto pass = entries - static_cast<int64_t>(skipped.size() + failed.size());
  std::cout << entries << " entries of op_db, " << db.json.at("programs").items().size() << " programs: " << pass
            << " entries pass, " << failed.size() << " do not, " << skipped.size()
            << " have no program. PyTorch's own DTensor passes about 420.\n";
  EXPECT_GE(pass, folder ? 0 : 680);
}

}  // namespace
}  // namespace tessera::parity
