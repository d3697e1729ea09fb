// Random environments of a compiled step. A step reads some items of its environment: parameters, options of modules,
// arguments of every type, thread state, captured variables. Between calls, items change. The same step runs in eager
// mode beside it, in an environment with the same changes. Results, memory and gradients must have equal bits, or
// compile() refuses the step with a message from kRefusals. A failure prints the items, the changes and the seed.
// TESSERA_SOAK=1 draws twenty-five times as many sequences.
#include "tessera/testing/detail/soak.h"
#include "tessera/testing/ranks.h"

#include "environment_items.h"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

namespace tessera::environment {
namespace {

std::string describe(const at::Tensor& t) {
  std::ostringstream out;
  if (!t.defined()) return "undefined";
  if (is_dtensor(t)) out << DTensor(t).placements()[0] << " ";
  const auto& local = detail::local_or_self(t);
  out << local.scalar_type() << (local.requires_grad() ? " requires grad " : " ")
      << local.detach().resolve_neg().resolve_conj().to(local.is_complex() ? at::kComplexDouble : at::kDouble);
  return out.str();
}

// Within the tolerance of a checked call: sums of Numerics::Fast are in another order.
bool is_close(const at::Tensor& found, const at::Tensor& wanted) {
  if (!found.defined() || !wanted.defined()) return found.defined() == wanted.defined();
  const auto as_double = [](const at::Tensor& t) {
    return detail::local_or_self(t).detach().resolve_neg().resolve_conj().to(t.is_complex() ? at::kComplexDouble
                                                                                            : at::kDouble);
  };
  const auto a = as_double(found), b = as_double(wanted);
  if (found.scalar_type() != wanted.scalar_type() || a.sizes() != b.sizes()) return false;
  const auto dtype = wanted.scalar_type();
  const double relative = dtype == at::kHalf ? 1e-2 : dtype == at::kBFloat16 ? 1e-1 : 1.3e-5;
  const auto largest = b.numel() == 0 ? 0.0 : b.abs().nan_to_num(0, 0, 0).max().item<double>();
  return at::allclose(a, b, 0, 1e-5 + relative * largest, /*equal_nan=*/true);
}

std::string first_difference(const char* what, const Tensors& found, const Tensors& wanted, bool fast = false) {
  if (found.size() != wanted.size()) return c10::str(what, ": ", found.size(), " instead of ", wanted.size(), "\n");
  for (size_t i = 0; i < wanted.size(); i++) {
    const auto a = describe(found[i]), b = describe(wanted[i]);
    if (a != b && !(fast && is_close(found[i], wanted[i])))
      return c10::str(what, " ", i, ": ", a, "\ninstead of ", b, "\n");
  }
  return "";
}

Tensors memory_of(Environment& e) {
  auto all = e.model->parameters();
  for (const auto& t : e.model->buffers()) all.push_back(t);
  for (const auto& p : e.captured_model->parameters()) all.push_back(p);
  all.insert(all.end(),
             {e.batch.x, e.other, e.captured_tensor, e.group_tensor, e.model->norm->weight, e.model->matrix});
  for (size_t i = 0, n = all.size(); i < n; i++) all.push_back(all[i].is_leaf() ? all[i].grad() : at::Tensor());
  all.insert(all.end(), e.kept.begin(), e.kept.end());
  if (e.model->row.grad().defined())  // otherwise a compiled step may have created its state
    for (const auto& [name, value] : e.optimizer->state(e.model->row)) all.push_back(value);
  return all;
}

// What compile() may say instead of running a step, and why each is in the list.
constexpr const char* kRefusals[] = {
    "has changed since the step was traced",  // a captured variable without ts::live
    "has an autograd history",                // backward runs into the graph of an argument
    "of layout Sparse cannot be traced",      // a sparse argument
    "cannot be an input of a program",        // a wrapped number, zeros, or a tangent
    "anomaly mode looks for NaN",             // which reads values
};

struct SequenceResult {
  std::string difference;  // "": equal, or refused
  bool refused = false;
};

// Runs the step in both environments `calls` times. Before each call but the first, `change` changes both, or nothing:
// after a call without a change, a program remembers what its guards have read.
template <class Change>
SequenceResult run_sequence(const Items& items, bool trains, int calls, uint32_t seed, const DeviceMesh& mesh,
                            const CompileOptions& options, const Change& change) {
  const bool fast = options.numerics == Numerics::Fast;
  Environment eager(mesh, seed), compiled(mesh, seed);
  auto step = compile(EnvironmentStep{items, trains, &compiled}, options);
  Tensors all_wanted, all_found;  // the caller keeps results, and writes into them
  for (int call = 0; call < calls; call++) {
    try {
      if (call > 0) change(call, eager, compiled);
    } catch (const std::exception& error) {
      return {c10::str("before call ", call, ", a change failed: ", error.what())};
    }
    Tensors wanted, found;
    try {
      const ThreadState state(eager);
      torch::manual_seed(seed + static_cast<uint32_t>(call));
      wanted = call_with(eager, EnvironmentStep{items, trains, &eager});
    } catch (const std::exception&) {
      return {};  // not a valid environment
    }
    try {
      const ThreadState state(compiled);
      torch::manual_seed(seed + static_cast<uint32_t>(call));
      found = call_with(compiled, step);
    } catch (const std::exception& error) {
      const std::string text = error.what();
      for (const auto* refusal : kRefusals)
        if (text.find(refusal) != std::string::npos) return {"", true};
      return {c10::str("call ", call, ": ", text.substr(0, 600)), false};
    }
    const auto text = first_difference("returned", found, wanted, fast) +
                      first_difference("memory", memory_of(compiled), memory_of(eager), fast);
    if (!text.empty()) return {c10::str("call ", call, ": ", text), false};
    for (size_t i = 0; i < wanted.size(); i++) {
      const auto& t = wanted[i];
      if (t.is_inference() != found[i].is_inference())
        return {c10::str("call ", call, ": result ", i, " is ", t.is_inference() ? "" : "not ",
                         "an inference tensor in eager")};
      if (!is_dtensor(t) && !t.is_inference() && t.is_non_overlapping_and_dense()) t.mul_(2), found[i].mul_(2);
    }
    all_wanted.insert(all_wanted.end(), wanted.begin(), wanted.end());
    all_found.insert(all_found.end(), found.begin(), found.end());
  }
  return {first_difference("result kept", all_found, all_wanted, fast)};
}

struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Captured variables are seen by traces on the first calls; everything else must be seen by the guards alone.
CompileOptions options_for(const Items& items, Numerics numerics = Numerics::Strict) {
  const bool captured = std::any_of(items.begin(), items.end(), [](const auto* item) {
    return std::string_view(item->name).find("captured") != std::string_view::npos;
  });
  return {.codegen = numerics == Numerics::Fast,
          .check = captured ? 8 : 0,
          .captures = captured ? Captures::Checked : Captures::None,
          .numerics = numerics};
}

// Each item, read alone and changed alone.
TEST(Environment, EachItemAlone) {
  testing::run_ranks(1, [](testing::Rank& me) {
    NoWarnings none;
    const c10::WarningUtils::WarningHandlerGuard quiet(&none);
    const auto mesh = me.mesh("x=1");
    for (const auto& item : kItems)
      for (uint32_t seed = 1; seed <= 4; seed++) {
        Random random(seed);
        const auto result = run_sequence({&item}, seed % 2 == 0, 8, seed, mesh, options_for({&item}),
                                         [&](int call, Environment& a, Environment& b) {
                                           if (seed > 2 && call % 3 != 0) return;
                                           const auto drawn = random();
                                           for (auto* e : {&a, &b}) {
                                             torch::manual_seed(drawn);
                                             Random same(drawn);
                                             item.change(*e, same);
                                           }
                                         });
        EXPECT_EQ(result.difference, "") << item.name << ", seed " << seed;
        if (!result.difference.empty()) break;
      }
  });
}

// A change has an effect in eager mode: the generator can find a program that ignores it.
TEST(Environment, EachChangeHasAnEffect) {
  testing::run_ranks(1, [](testing::Rank& me) {
    const auto mesh = me.mesh("x=1");
    for (const auto& item : kItems) {
      Environment e(mesh, 1), changed(mesh, 1);
      bool has_effect = false;
      for (uint32_t n = 0; n < 8 && !has_effect; n++) {
        Random random(n);
        torch::manual_seed(n);
        item.change(changed, random);
        std::string texts[2];
        for (auto* each : {&e, &changed}) {
          const ThreadState state(*each);
          torch::manual_seed(n);
          std::ostringstream text;
          for (const auto& t : call_with(*each, EnvironmentStep{{&item}, true, each})) text << describe(t);
          for (const auto& t : memory_of(*each)) text << describe(t);
          texts[each == &changed] = text.str();
        }
        has_effect = texts[0] != texts[1];
      }
      EXPECT_TRUE(has_effect) << item.name;
    }
  });
}

void compare_random_sequences(const testing::SeedRange& seeds, Numerics numerics) {
  testing::run_ranks(1, [&](testing::Rank& me) {
    NoWarnings none;
    const c10::WarningUtils::WarningHandlerGuard quiet(&none);
    const auto mesh = me.mesh("x=1");
    const uint32_t sequences = seeds.end - seeds.first;
    uint32_t refused = 0;
    for (uint32_t seed = seeds.first; seed < seeds.end; seed++) {
      Random random(seed);
      Items items;
      for (int64_t n = 1 + below(random, 3); n > 0; n--)
        items.push_back(&kItems[below(random, static_cast<int64_t>(std::size(kItems)))]);
      std::string changes;
      const auto result = run_sequence(
          items, below(random, 2) == 0, 5, seed, mesh, options_for(items, numerics),
          [&](int, Environment& a, Environment& b) {
            if (below(random, 3) == 0) return;
            const auto& item = below(random, 4) == 0
                                   ? kItems[below(random, static_cast<int64_t>(std::size(kItems)))]
                                   : *items[static_cast<size_t>(below(random, static_cast<int64_t>(items.size())))];
            changes += c10::str("\n  ", item.name);
            const auto drawn = random();
            for (auto* e : {&a, &b}) {
              torch::manual_seed(drawn);
              Random same(drawn);
              item.change(*e, same);
            }
          });
      refused += result.refused;
      if (result.difference.empty()) continue;
      std::string names;
      for (const auto* item : items) names += c10::str("\n  ", item->name);
      ADD_FAILURE() << "seed " << seed << ", items" << names << "\nchanges" << changes << "\n" << result.difference;
      return;
    }
    // At most 5 % of all sequences. Fewer than 50,000 can have more by chance: three standard deviations are allowed.
    const double by_chance = sequences < 50'000 ? 3 * std::sqrt(0.05 * 0.95 * sequences) : 0;
    EXPECT_LE(refused, 0.05 * sequences + by_chance);
    std::cout << refused << " of " << sequences << " sequences were refused\n";
  });
}

TEST(Environment, RandomSequencesEqualEager) {
  compare_random_sequences(testing::soak_seeds(1, 2'000, 50'000), Numerics::Strict);
}
// With generated kernels: most time is the compiler's.
TEST(Environment, RandomSequencesAreCloseWithFastNumerics) {
  compare_random_sequences(testing::soak_seeds(100'001, 5, 500), Numerics::Fast);
}

}  // namespace
}  // namespace tessera::environment
