// PyTorch's operator database on distributed tensors. tests/parity/op_db.py dumped each sample as an ATen program with
// its inputs, results and gradients; here the programs run on DTensors with many placements, on uneven and empty
// shards, with autograd above them. They also run with the in-place and out= forms of their ops, and compiled.
// `make test` runs the samples of tests/parity/op_db; `make parity-ops` dumps more, and runs all combinations.
#include "op_db_forms.h"
#include "op_db_replay.h"

#include "tessera/base/error.h"
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/headeronly/version.h>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <set>

namespace tessera::parity {
namespace {

// ---- combinations ----

// Each: every assignment of one placement (R, P(sum), S(d)) per input. The others are one assignment per sample.
enum class Spread { Dim0, Dim1, LastDim, Random, Each };

struct Combination {
  const char* name;
  const char* dtype;  // of the samples; "": the first dtype of the entry, float32 if it takes that
  std::vector<int64_t> mesh;
  Spread spread;
  Form form = Form::Functional;
  size_t every = 1;  // `make test` runs every n-th sample
};

const std::vector<Combination>& combinations() {
  static const std::vector<Combination> all = {
      {"float32, each placement", "", {2}, Spread::Each},
      {"float32, each placement, 4 ranks", "", {4}, Spread::Each, Form::Functional, 2},
      {"float32, S(0)", "", {2}, Spread::Dim0},
      {"float32, S(1)", "", {2}, Spread::Dim1},
      {"float32, S(-1)", "", {2}, Spread::LastDim, Form::Functional, 2},
      {"float32, S(0), 4 ranks", "", {4}, Spread::Dim0, Form::Functional, 2},
      {"float32, random placements, 2 x 2", "", {2, 2}, Spread::Random, Form::Functional, 2},
      {"bfloat16, each placement", "bfloat16", {2}, Spread::Each},
      {"bfloat16, each placement, 4 ranks", "bfloat16", {4}, Spread::Each, Form::Functional, 4},
      {"bfloat16, random placements, 2 x 2", "bfloat16", {2, 2}, Spread::Random, Form::Functional, 4},
      {"int64, each placement", "int64", {2}, Spread::Each},
      {"int64, each placement, 4 ranks", "int64", {4}, Spread::Each, Form::Functional, 4},
      {"int64, random placements, 2 x 2", "int64", {2, 2}, Spread::Random, Form::Functional, 4},
      {"complex64, each placement", "complex64", {2}, Spread::Each},
      {"complex64, each placement, 4 ranks", "complex64", {4}, Spread::Each, Form::Functional, 4},
      {"complex64, random placements, 2 x 2", "complex64", {2, 2}, Spread::Random, Form::Functional, 4},
      {"float32, in-place forms", "", {2}, Spread::Random, Form::InPlace, 2},
      {"float32, in-place forms, 4 ranks", "", {4}, Spread::Random, Form::InPlace, 4},
      {"float32, in-place forms, 2 x 2", "", {2, 2}, Spread::Random, Form::InPlace, 8},
      {"float32, out= forms", "", {2}, Spread::Random, Form::Out, 2},
      {"float32, out= forms, 4 ranks", "", {4}, Spread::Random, Form::Out, 4},
      {"float32, out= forms, 2 x 2", "", {2, 2}, Spread::Random, Form::Out, 8},
      {"float32, compiled", "", {2}, Spread::Random, Form::Compiled, 8},
  };
  return all;
}

// The placements of a tensor on one axis: R, S(d) for each dim, P(sum) if it has numbers. Random ops refuse a partial
// tensor: it has no values to draw from, or to replace, before its reduction.
std::vector<Placement> choices_of(const at::Tensor& t, bool is_random) {
  std::vector<Placement> choices = {Replicate()};
  for (int64_t d = 0; d < t.dim(); d++) choices.emplace_back(Shard(d));
  const bool sums = t.scalar_type() != at::kBool && c10::elementSize(c10::toRealValueType(t.scalar_type())) > 1;
  if (t.dim() > 0 && sums && !is_random && t.scalar_type() != at::kUInt64) choices.emplace_back(Partial());
  return choices;
}

// The number of assignments of one placement per input that a sample runs.
constexpr size_t kMostAssignments = 24;
size_t assignments_of(const Tensors& inputs, bool is_random) {
  size_t count = 1;
  for (const auto& t : inputs) count = std::min(kMostAssignments, count * choices_of(t, is_random).size());
  return count;
}

// The placements of all inputs. `assignment` counts those of Spread::Each; if a sample has more than kMostAssignments,
// these are drawn at random.
std::vector<Placements> placements_of(const Tensors& inputs, bool is_random, Spread spread, int64_t axes,
                                      size_t assignment, std::minstd_rand& random) {
  size_t all = 1;
  for (const auto& t : inputs) all = std::min<size_t>(1000, all * choices_of(t, is_random).size());
  std::vector<Placements> placements;
  for (const auto& t : inputs) {
    const auto choices = choices_of(t, is_random);
    const bool counted = spread == Spread::Each && all <= kMostAssignments;
    const auto one = [&]() -> Placement {
      if (counted) {
        const auto chosen = assignment % choices.size();
        assignment /= choices.size();
        return choices[chosen];
      }
      switch (spread) {
        case Spread::Dim0:
          return t.dim() > 0 ? Placement(Shard(0)) : Replicate();
        case Spread::Dim1:
          return t.dim() > 1 ? Placement(Shard(1)) : Replicate();
        case Spread::LastDim:
          return t.dim() > 0 ? Placement(Shard(t.dim() - 1)) : Replicate();
        case Spread::Random:
        case Spread::Each:
          return choices[random() % choices.size()];
      }
      return Replicate();
    };
    placements.emplace_back();
    for (int64_t axis = 0; axis < axes; axis++) placements.back().push_back(one());
  }
  return placements;
}

// Distributes `t`. Of a partial value each element is on one rank of the axis, and zero on the others: the sum is
// exact.
at::Tensor place(const at::Tensor& t, const DeviceMesh& mesh, const Placements& placements) {
  auto shards = placements;
  std::replace_if(
      shards.begin(), shards.end(), [](const auto& p) { return p.is_partial(); }, Placement(Replicate()));
  const auto value = distribute_tensor(t, mesh, shards);
  if (shards == placements) return value;
  const auto number = distribute_tensor(at::arange(t.numel(), at::kLong).view(t.sizes()), mesh, shards).to_local();
  const auto coordinate = mesh.get_coordinate().value();
  auto local = value.to_local();
  for (size_t axis = 0; axis < placements.size(); axis++) {
    if (!placements[axis].is_partial()) continue;
    const auto owner = number.add(static_cast<int64_t>(axis)).remainder(mesh.size(static_cast<int64_t>(axis)));
    local = at::empty_like(local).copy_(at::where(owner == coordinate[axis], local, at::zeros({}, t.options())));
  }
  return DTensor::from_local(local, mesh, placements, {.shape = t.sizes().vec(), .stride = value.strides().vec()});
}

// ---- comparison ----

at::Tensor cotangent(const at::Tensor& t) {
  return at::linspace(0.5, 1.5, t.numel(), at::kDouble).to(t.scalar_type()).reshape(t.sizes());
}

at::Tensor plain_of(const at::Tensor& t) {
  const auto value = t.detach();
  return (is_dtensor(value) ? DTensor(value).full_tensor() : value).resolve_conj().resolve_neg();
}

// Small dtypes have no kernels to compare with.
at::Tensor comparable(const at::Tensor& t) {
  if (t.scalar_type() == at::kComplexHalf) return at::view_as_complex(at::view_as_real(t).to(at::kFloat));
  if (t.is_floating_point() && t.element_size() < 4) return t.to(at::kFloat);
  return t.scalar_type() == at::kUInt64 ? t.view(at::kLong) : t;
}

// `rounding_error`: of the expected values themselves, if their dtype is small. A gradient that cancels has no digits.
bool is_close(const at::Tensor& x, const at::Tensor& expected, at::ScalarType dtype, double rounding_error) {
  if (!x.is_floating_point() && !x.is_complex()) return at::equal(x, expected);
  const auto bytes = static_cast<int64_t>(c10::elementSize(c10::toRealValueType(dtype)));
  if (bytes >= 4) return at::allclose(x, expected, 5e-4, 2e-4, /*equal_nan=*/true);
  // Sums in another order: an error of a few units of the largest value.
  const double unit = bytes == 1 ? 0.07 : 0.02;
  const auto finite = expected.abs().nan_to_num(0, 0, 0);
  const double largest = std::max(1.0, finite.max().item<double>());
  return at::allclose(x, expected, 2 * unit, unit * largest + 2 * rounding_error, /*equal_nan=*/true);
}

std::string difference(const at::Tensor& found, const at::Tensor& expected, const std::string& what,
                       double rounding_error) {
  const auto full = plain_of(found);
  if (full.sizes() != expected.sizes())
    return c10::str(what, " has sizes ", full.sizes(), ", PyTorch's ", expected.sizes());
  if (full.scalar_type() != expected.scalar_type())
    return c10::str(what, " is ", full.scalar_type(), ", PyTorch's ", expected.scalar_type());
  const auto x = comparable(full), y = comparable(expected);
  if (x.numel() == 0 || is_close(x, y, expected.scalar_type(), rounding_error)) return "";
  const auto off = x.sub(y).abs().to(at::kDouble);
  return c10::str(what, " differs from PyTorch's by up to ", off.max().item<double>(), "; its largest value is ",
                  y.abs().to(at::kDouble).max().item<double>());
}

// ---- one program ----

bool flag(const Json& json) { return *json.get_if<bool>(); }

// A program with its inputs on a mesh.
struct PlacedProgram {
  const OpDb& db;
  size_t number;
  const Json& json;
  DeviceMesh mesh;
  size_t inputs, all;  // all: with constants
  Tensors leaves;

  PlacedProgram(const OpDb& db, size_t number, const DeviceMesh& mesh, Spread spread, size_t assignment)
      : db(db),
        number(number),
        json(db.program(number)),
        mesh(mesh),
        inputs(static_cast<size_t>(json.at("inputs").number())),
        all(inputs + static_cast<size_t>(json.at("constants").number())) {
    std::minstd_rand random(static_cast<unsigned>(number + 1000 * assignment) + 1);
    Tensors values;
    for (size_t i = 0; i < inputs; i++) values.push_back(db.input(number, i));
    auto placements = placements_of(values, is_random(), spread, mesh.ndim(), assignment, random);
    for (size_t i = inputs; i < all; i++) {
      values.push_back(db.input(number, i));
      placements.emplace_back(static_cast<size_t>(mesh.ndim()), Replicate());
    }
    for (size_t i = 0; i < all; i++)
      leaves.push_back(place(values[i], mesh, placements[i]).set_requires_grad(wants_grad(i)));
  }

  bool wants_grad(size_t i) const { return i < inputs && flag(json.at("grad").items()[i]); }
  bool has_grad(size_t i) const { return flag(json.at("has_grad").items()[i]); }
  bool any_grad() const {
    for (size_t i = 0; i < inputs; i++)
      if (has_grad(i)) return true;
    return false;
  }
  double rounding_error() const {
    const auto* error = json.find("rounding_error");
    return error ? real_of(*error) : 0;
  }
  bool is_random() const { return flag(json.at("random")); }
  bool makes_tensors() const { return flag(json.at("makes_tensors")); }
  size_t results() const { return json.at("outputs").items().size(); }
  at::Tensor result(const Replay& run, size_t i) const {
    return run.value(json.at("outputs").items()[i].number()).toTensor();
  }
  // The inputs of the first node: leaves are multiplied by 1, because programs write in place.
  std::vector<IValue> values(const Tensors& of) const {
    std::vector<IValue> values;
    for (size_t i = 0; i < all; i++) values.emplace_back(wants_grad(i) ? of[i] * 1 : of[i]);
    return values;
  }
  // "" if the result is as expected.
  std::string compare(const at::Tensor& found, size_t i) const {
    const auto expected = db.tensor(number, 'o', i);
    if (!is_random()) return difference(found, expected, c10::str("result ", i), rounding_error());
    return found.sizes() == expected.sizes() ? "" : c10::str("result ", i, " has another size");
  }
  std::string compare_gradient(const at::Tensor& found, size_t i) const {
    if (!found.defined()) return c10::str("input ", i, " has no gradient");
    return difference(found, db.tensor(number, 'g', i), c10::str("the gradient of input ", i), rounding_error());
  }
};

struct Outcome {
  std::string why;       // "": it passes
  bool has_form = true;  // false: no op of the program has the form
};

// The gradients of the leaves that have one, in order.
Tensors gradients(const PlacedProgram& program, const Tensors& results, const Tensors& leaves) {
  Tensors through, seeds, asked;
  for (const auto& result : results) {
    if (!result.requires_grad()) continue;
    through.push_back(result);
    const auto seed = cotangent(result.detach());
    seeds.push_back(seed);
  }
  for (size_t i = 0; i < program.inputs; i++)
    if (program.has_grad(i)) asked.push_back(leaves[i]);
  return torch::autograd::grad(through, asked, seeds, std::nullopt, false, /*allow_unused=*/true);
}

// Whether the plain tensors of the in-place form have gradients: LibTorch refuses some.
bool plain_backward_works(const PlacedProgram& program, const Tensors& results, const Tensors& leaves) {
  try {
    gradients(program, results, leaves);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

Outcome run_eager(const PlacedProgram& program, Form form) {
  std::optional<ImplicitReplication> plain_is_replicated;
  if (program.makes_tensors()) plain_is_replicated.emplace();
  c10::AutoGradMode grad_mode(form != Form::Out);
  Replay run(program.values(program.leaves));
  Tensors plain_leaves;
  for (size_t i = 0; i < program.all; i++) {
    if (form == Form::Functional) break;
    plain_leaves.push_back(program.db.input(program.number, i));
    if (program.wants_grad(i)) plain_leaves.back().set_requires_grad(true);
  }
  Replay plain(form == Form::Functional ? std::vector<IValue>() : program.values(plain_leaves));
  FormRunner forms(form, program.mesh, static_cast<unsigned>(program.number) + 7);
  Outcome outcome{"", form == Form::Functional};
  for (const auto& node : program.json.at("nodes").items()) {
    if (form != Form::Functional && forms.run(node, plain, run)) {
      outcome.has_form = true;
      continue;
    }
    run.run(node);
    if (form != Form::Functional) plain.run(node);
  }
  if (!outcome.has_form) return outcome;

  if (const auto* value = program.json.find("value")) {
    const auto found = run.value(static_cast<int64_t>(program.all)).toScalar(), expected = number_of(*value).toScalar();
    if (std::abs(found.toComplexDouble() - expected.toComplexDouble()) >= 1e-5) outcome.why = "another value";
    return outcome;
  }
  Tensors through, cotangents, plain_results;
  for (size_t i = 0; i < program.results(); i++) {
    const auto found = program.result(run, i);
    if (outcome.why = program.compare(found, i); !outcome.why.empty()) return outcome;
    if (form != Form::Functional) plain_results.push_back(program.result(plain, i));
    if (!found.requires_grad()) continue;
    through.push_back(found);
    const auto seed = cotangent(program.db.tensor(program.number, 'o', i));
    const Placements replicated(static_cast<size_t>(program.mesh.ndim()), Replicate());
    cotangents.push_back(is_dtensor(found) ? at::Tensor(distribute_tensor(seed, program.mesh, replicated)) : seed);
  }
  if (!program.any_grad() || program.is_random() || form == Form::Out) return outcome;
  if (form == Form::InPlace && !plain_backward_works(program, plain_results, plain_leaves)) return outcome;
  torch::autograd::backward(through, cotangents);
  for (size_t i = 0; i < program.inputs; i++)
    if (program.has_grad(i))
      if (outcome.why = program.compare_gradient(program.leaves[i].grad(), i); !outcome.why.empty()) return outcome;
  return outcome;
}

// Forward and backward as one compiled function. The first call traces, the second runs the program.
Outcome run_compiled(const PlacedProgram& program) {
  Tensors seeds;
  const Placements replicated(static_cast<size_t>(program.mesh.ndim()), Replicate());
  for (size_t i = 0; i < program.results(); i++)
    seeds.emplace_back(
        distribute_tensor(cotangent(program.db.tensor(program.number, 'o', i)), program.mesh, replicated));
  const bool with_backward = program.any_grad() && !program.is_random();
  auto step = compile(
      [&program, with_backward](const Tensors& leaves, const Tensors& seeds) {
        std::optional<ImplicitReplication> plain_is_replicated;
        if (program.makes_tensors()) plain_is_replicated.emplace();
        Replay run(program.values(leaves));
        for (const auto& node : program.json.at("nodes").items()) run.run(node);
        Tensors results, through, cotangents, asked;
        for (size_t i = 0; i < program.results(); i++) {
          results.push_back(program.result(run, i));
          if (!results[i].requires_grad()) continue;
          through.push_back(results[i]);
          cotangents.push_back(is_dtensor(results[i]) ? seeds[i] : DTensor(seeds[i]).to_local());
        }
        for (auto& result : results) result = result.detach();
        if (!with_backward) return results;
        for (size_t i = 0; i < program.inputs; i++)
          if (program.has_grad(i)) asked.push_back(leaves[i]);
        for (auto& gradient : torch::autograd::grad(through, asked, cotangents)) results.push_back(gradient);
        return results;
      },
      {.codegen = false, .captures = Captures::None});
  for (int call = 0; call < 2; call++) {
    const auto found = step(program.leaves, seeds);
    std::string why;
    for (size_t i = 0; i < program.results() && why.empty(); i++) why = program.compare(found[i], i);
    size_t next = program.results();
    for (size_t i = 0; i < program.inputs && with_backward && why.empty(); i++)
      if (program.has_grad(i)) why = program.compare_gradient(found[next++], i);
    if (!why.empty()) return {c10::str("call ", call + 1, ": ", why)};
  }
  if (step.cache().size() != 1) return {c10::str("two calls have ", step.cache().size(), " programs")};
  return {};
}

Outcome run_program(const OpDb& db, size_t number, const Combination& combination, size_t assignment) {
  static const std::vector<std::string> kAxes = {"x", "y"};
  const std::vector<std::string> names(kAxes.begin(), kAxes.begin() + static_cast<int64_t>(combination.mesh.size()));
  const PlacedProgram program(db, number, init_device_mesh("cpu", combination.mesh, names), combination.spread,
                              assignment);
  return combination.form == Form::Compiled ? run_compiled(program) : run_eager(program, combination.form);
}

// ---- all programs ----

// The first line, or the line of the first rank that failed.
std::string first_line_of(const std::exception& e) {
  const auto* ours = dynamic_cast<const c10::Error*>(&e);
  std::string text = ours ? ours->what_without_backtrace() : e.what();
  if (const auto rank = text.find("(the first to fail): "); rank != std::string::npos) text = text.substr(rank + 21);
  return text.substr(0, std::min<size_t>(text.find('\n'), 300));
}

// Runs the assignments from `first` to before `end`.
Outcome run_on_ranks(const OpDb& db, size_t number, const Combination& combination, size_t first, size_t end) {
  int64_t ranks = 1;
  for (auto n : combination.mesh) ranks *= n;
  std::vector<Outcome> found(static_cast<size_t>(ranks));
  const auto run = [&](testing::Rank& me) {
    auto& own = found[static_cast<size_t>(me.rank)];
    for (size_t i = first; i < end && own.why.empty(); i++) own = run_program(db, number, combination, i);
  };
  try {
    testing::run_ranks(ranks, run, {.timeout = std::chrono::seconds(120)});
  } catch (const std::exception& e) {
    return {first_line_of(e)};
  }
  for (const auto& each : found)
    if (!each.why.empty()) return each;
  return found[0];
}

// The result of one combination.
struct Summary {
  std::set<std::string> entries;              // with a sample of the dtype, and with the form
  std::map<std::string, std::string> failed;  // and why
  int64_t runs = 0;
};

// TESSERA_OP_DB_PART=0/4: every fourth entry, so that four processes run all.
struct Part {
  size_t index = 0, count = 1;
};

Part part_of_entries() {
  const char* text = std::getenv("TESSERA_OP_DB_PART");
  if (!text) return {};
  const std::string part = text;
  const auto slash = part.find('/');
  return {std::stoul(part.substr(0, slash)), std::stoul(part.substr(slash + 1))};
}

Summary run_combination(const OpDb& db, const Combination& combination, bool all_samples) {
  Summary summary;
  const auto& programs = db.json.at("programs").items();
  const char* only = std::getenv("TESSERA_OP_DB_ENTRY");
  const auto part = part_of_entries();
  std::map<std::string, size_t> numbers;  // of the entries
  size_t of_dtype = 0;
  std::map<std::string, int> compiled;  // samples of an entry
  for (size_t p = 0; p < programs.size(); p++) {
    const auto& name = programs[p].at("name").text();
    const auto* other = programs[p].find("other_dtype");
    if (numbers.try_emplace(name, numbers.size()).first->second % part.count != part.index) continue;
    if ((other ? other->text() : std::string()) != combination.dtype) continue;
    if (only ? name != only : !all_samples && of_dtype++ % combination.every != 0) continue;
    if (summary.failed.contains(name) && !only) continue;
    if (std::getenv("TESSERA_OP_DB_VERBOSE")) std::cerr << combination.name << ": " << name << std::endl;
    if (combination.form == Form::Compiled && all_samples && ++compiled[name] > 3) continue;
    if (combination.form == Form::Compiled && programs[p].find("value")) {
      summary.entries.insert(name);
      summary.failed.emplace(name, "it returns a value of the host");
      continue;
    }
    size_t assignments = 1;
    if (combination.spread == Spread::Each) {
      Tensors inputs;
      for (int64_t i = 0; i < programs[p].at("inputs").number(); i++)
        inputs.push_back(db.input(p, static_cast<size_t>(i)));
      assignments = assignments_of(inputs, flag(programs[p].at("random")));
    }
    const size_t first = all_samples ? 0 : p % assignments;  // `make test` runs one, another one for each sample
    const auto outcome = run_on_ranks(db, p, combination, first, all_samples ? assignments : first + 1);
    summary.runs += static_cast<int64_t>(all_samples ? assignments : 1);
    if (outcome.has_form || !outcome.why.empty()) summary.entries.insert(name);
    if (!outcome.why.empty()) summary.failed.emplace(name, outcome.why);
  }
  return summary;
}

// Entries that compile() refuses, and why. Entries without a program are in the dump, with the reason.
const std::map<std::string, std::string>& not_compiled() {
  static const std::map<std::string, std::string> names = {
      {"allclose", "it returns a value of the host"},
      {"argwhere", "its result, or its size, depends on values"},
      {"bincount", "its result, or its size, depends on values"},
      {"equal", "it returns a value of the host"},
      {"index_put", "the gradient of its values has as many rows as the mask selects"},
      {"item", "it returns a value of the host"},
      {"masked_select", "its result, or its size, depends on values"},
      {"nn.functional.one_hot", "its result, or its size, depends on values"},
      {"nonzero", "its result, or its size, depends on values"},
      {"tensor_split", "its result, or its size, depends on values"},
      {"unique", "its result, or its size, depends on values"},
      {"unique_consecutive", "its result, or its size, depends on values"},
  };
  return names;
}

// PyTorch's own test of DTensor (test/distributed/tensor/test_dtensor_ops.py) expects these numbers of entries to fail:
// 73 + 5 xfail and 36 + 1 skipped, 168 without a strategy; 43 more in compiled form. It runs float32 on even shards of
// one axis of 4, ignores failures in backward, and has no test of the other combinations.
constexpr int64_t kPyTorchPasses = 702 - 73 - 5 - 36 - 1 - 168, kPyTorchPassesCompiled = kPyTorchPasses - 43;

std::string pytorch_passes(const Combination& combination) {
  if (combination.form == Form::Compiled) return c10::str(kPyTorchPassesCompiled);
  const bool tested = combination.form == Form::Functional && combination.dtype[0] == 0 && combination.mesh.size() == 1;
  return tested ? c10::str(kPyTorchPasses) : "not tested";
}

TEST(OpDb, EntriesRunOnDistributedTensors) {
  const char* folder = std::getenv("TESSERA_OP_DB");  // another dump, as `make parity-ops` makes it
  if (TORCH_VERSION_MINOR != 13 && !folder)
    GTEST_SKIP() << "LibTorch " TORCH_VERSION
                    "; the entries are those of 2.13: set TESSERA_OP_DB to a dump of this one";
  at::set_num_threads(1);
  const char* only = std::getenv("TESSERA_OP_DB_COMBINATION");
  const OpDb db(folder ? folder : TESSERA_PARITY_SCRIPTS "/op_db");
  const auto entries = db.json.at("entries").number();
  const auto& skipped = db.json.at("skipped").members();
  std::map<std::string, std::string> failed;
  std::ostringstream table;
  table << std::left << std::setw(40) << "combination" << std::setw(10) << "entries" << std::setw(10) << "pass"
        << std::setw(10) << "runs"
        << "PyTorch's DTensor\n";
  for (const auto& combination : combinations()) {
    if (only && std::string(combination.name).find(only) == std::string::npos) continue;
    const auto summary = run_combination(db, combination, folder != nullptr);
    table << std::setw(40) << combination.name << std::setw(10) << summary.entries.size() << std::setw(10)
          << summary.entries.size() - summary.failed.size() << std::setw(10) << summary.runs
          << pytorch_passes(combination) << '\n';
    for (const auto& [name, why] : summary.failed) {
      std::cout << "  " << name << "  " << combination.name << ": " << why << std::endl;
      const bool expected = combination.form == Form::Compiled && not_compiled().contains(name);
      EXPECT_TRUE(expected) << name << "  " << combination.name << ": " << why;
      if (combination.form != Form::Compiled) failed.emplace(name, why);
    }
    const bool all_compiled = combination.form == Form::Compiled && folder && part_of_entries().count == 1 &&
                              !std::getenv("TESSERA_OP_DB_ENTRY");
    EXPECT_GE(summary.entries.size() - summary.failed.size(), all_compiled ? 680u : 0u);
  }
  for (const auto& [name, why] : skipped) std::cout << "  " << name << "  no program: " << why.text() << "\n";
  const auto pass = entries - static_cast<int64_t>(skipped.size() + failed.size());
  std::cout << table.str() << entries << " entries of op_db, " << db.json.at("programs").items().size()
            << " programs: " << pass << " entries pass in every combination, " << failed.size() << " do not, "
            << skipped.size() << " have no program. PyTorch's own DTensor passes " << kPyTorchPasses
            << " in its one combination.\n";
  EXPECT_GE(pass, 690);
}

}  // namespace
}  // namespace tessera::parity
