#include "tessera/base/detail/hash.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/module_tree.h"
#include "tessera/tensor_parallel/detail/check_advice.h"
#include "tessera/tensor_parallel/detail/check_comparison.h"
#include "tessera/tensor_parallel/detail/check_recorder.h"
#include "tessera/tensor_parallel/detail/model_snapshot.h"
#include "tessera/tensor_parallel/detail/module_plan.h"
#include "tessera/tensor_parallel/detail/plain_dropout.h"
#include "tessera/tensor_parallel/detail/style_hooks.h"
#include "tessera/tensor_parallel/parallelize_module.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

// The plain model runs first, and records what enters and leaves each module. Then the model is parallelized and runs
// with the same inputs and random numbers. Every rank has the plain values, so each compares its local tensors with its
// shards of them, without communication. The ranks then exchange the results through the store and decide together.
namespace tessera {
namespace {

using torch::autograd::variable_list;

constexpr const char* kCheck = "check_parallel";

// What differs first, equal on all ranks.
struct Difference {
  std::string module, text;
  size_t event = 0;
  bool threw = false;  // the parallel run threw an exception
};

// ---- the runs ----

std::string message_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours ? ours->what_without_backtrace() : error.what();
}

// The gradients of one run.
struct RunGradients {
  variable_list inputs, parameters;
  std::vector<variable_list> outputs;  // of the modules, by event; empty for the inputs of modules
};

class ParallelCheck {
 public:
  ParallelCheck(Module& model, const DeviceMesh& mesh, const Plan& plan, const Tensors& inputs,
                const ForwardCall& forward)
      : model_(model), mesh_(mesh), plan_(plan), inputs_(inputs), forward_(forward) {}

  void run() {
    for (const auto& item : model_.named_parameters())
      TESSERA_CHECK(!item.value().is_meta(), UsageError, kCheck, ": parameter '", item.key(),
                    "' is on the meta device. Call check_parallel after materialize, or on a small model of the same ",
                    "class without deferred_init");
    const auto plans = resolve_plan(model_, mesh_, plan_);
    require_equal_inputs();
    ModelSnapshot snapshot(model_, inputs_);
    snapshot_ = &snapshot;
    use_equal_parameters(plans);
    run_plain();
    const auto difference = find_difference(plan_);
    if (difference) fail(*difference);
  }

 private:
  const comm::Group group() const { return mesh_.get_group(); }

  // ---- values that must be equal on all ranks ----

  static std::string hash_of(const at::Tensor& t) {
    if (!t.defined()) return "undefined";
    const auto bytes = t.detach().cpu().contiguous();
    return c10::str(t.sizes(), " ", t.scalar_type(), " ", hash_bytes(bytes.const_data_ptr(), bytes.nbytes()));
  }

  void require_equal_inputs() {
    std::vector<std::string> lines;
    for (size_t i = 0; i < inputs_.size(); i++)
      lines.push_back(c10::str("input ", i, ": ", is_dtensor(inputs_[i]) ? "a DTensor" : hash_of(inputs_[i])));
    comm::require_same_on_all_ranks(
        group(), c10::str(kCheck, ": plain inputs must be equal on all ranks; pass a shard as a DTensor"), lines);
  }

  // parallelize_module sends the values of rank 0 for parameters that it shards. The plain run must use them too. All
  // other parameters and buffers must be equal on all ranks.
  void use_equal_parameters(const std::vector<ModulePlan>& plans) {
    auto items = model_.named_parameters().items();
    const auto parameters = items.size();
    for (const auto& b : model_.named_buffers()) items.emplace_back(b.key(), b.value());
    const auto unequal = comm::gather_decide_broadcast(
        group(), kCheck,
        [&] {
          std::string text;
          for (const auto& item : items) text += hash_of(item.value()) + "\n";
          return text;
        },
        [&](const std::vector<std::string>& texts) {
          std::vector<std::istringstream> streams;
          for (const auto& text : texts) streams.emplace_back(text);
          std::string indices;
          for (size_t i = 0; i < items.size(); i++) {
            std::string first, line;
            for (auto& stream : streams) {
              std::getline(stream, line);
              if (&stream == &streams[0]) first = line;
              if (line != first) {
                indices += std::to_string(i) + " ";
                for (auto* rest = &stream + 1; rest != streams.data() + streams.size(); rest++)
                  std::getline(*rest, line);
                break;
              }
            }
          }
          return indices;
        });
    std::istringstream indices(unequal);
    for (size_t i = 0; indices >> i;) {
      const auto& name = items[i].key();
      TESSERA_CHECK(i < parameters && is_sent(plans, name), UsageError, kCheck, ": '", name,
                    "' has different values on the ranks, and the plan does not distribute it. Replicated values must ",
                    "be equal: create the model with the same seed on all ranks, or load the same state dict");
      auto value = items[i].value().detach().clone(at::MemoryFormat::Contiguous);
      group()->broadcast(value, 0).wait();
      snapshot_->replace_parameter(items[i].value(), value);
    }
  }
  static bool is_sent(const std::vector<ModulePlan>& plans, const std::string& name) {
    for (const auto& plan : plans)
      for (const auto& p : plan.parameters)
        if (p.communicates && (plan.path.empty() ? p.name : plan.path + "." + p.name) == name) return true;
    return false;
  }

  // ---- one run ----

  // New leaves with the values of the inputs. The plain run gets full tensors.
  Tensors leaves(bool plain) const {
    Tensors made;
    at::NoGradGuard no_grad;
    for (const auto& t : inputs_) {
      if (!t.defined()) {
        made.push_back(t);
        continue;
      }
      auto leaf = plain && is_dtensor(t) ? DTensor(t.detach()).full_tensor().clone() : t.detach().clone();
      if (leaf.is_floating_point() || leaf.is_complex()) leaf.set_requires_grad(true);
      made.push_back(leaf);
    }
    return made;
  }

  Tensors parameters() const {
    Tensors found;
    for (const auto& p : model_.parameters())
      if (p.requires_grad()) found.push_back(p);
    return found;
  }
  std::vector<std::string> parameter_names() const {
    std::vector<std::string> found;
    for (const auto& item : model_.named_parameters())
      if (item.value().requires_grad()) found.push_back(item.key());
    return found;
  }

  // Differentiates sum(outputs * weights).
  RunGradients differentiate(const CallRecord& record, const Tensors& leaves, const Tensors& outputs,
                             const Tensors& weights) {
    variable_list roots, seeds, targets;
    for (size_t i = 0; i < outputs.size(); i++) {
      if (!outputs[i].defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      seeds.push_back(weights[i]);
    }
    RunGradients gradients;
    gradients.outputs.resize(record.events.size());
    if (roots.empty()) return gradients;
    std::vector<at::Tensor*> slots;
    const auto want = [&](const Tensors& tensors, variable_list& to) {
      to.resize(tensors.size());
      for (size_t i = 0; i < tensors.size(); i++) {
        if (!tensors[i].defined() || !tensors[i].requires_grad()) continue;
        targets.push_back(tensors[i]);
        slots.push_back(&to[i]);
      }
    };
    want(leaves, gradients.inputs);
    want(parameters(), gradients.parameters);
    for (size_t e = 0; e < record.events.size(); e++)
      if (record.events[e].is_output) want(record.events[e].tensors, gradients.outputs[e]);
    if (targets.empty()) return gradients;
    const auto found = torch::autograd::grad(roots, targets, seeds, /*retain_graph=*/std::nullopt,
                                             /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < found.size(); i++) *slots[i] = found[i];
    return gradients;
  }

  // Different for every element, equal on all ranks.
  static at::Tensor weights_like(const at::Tensor& t) {
    if (!t.defined()) return t;
    return at::arange(t.numel(), t.options().dtype(at::kDouble).requires_grad(false))
        .mul(0.7)
        .cos()
        .view(t.sizes())
        .to(t.scalar_type());
  }

  void run_plain() {
    snapshot_->begin_trial();
    const auto record = record_calls(model_);
    plain_leaves_ = leaves(true);
    snapshot_->restore_random_states();
    {
      const PlainDropoutScope dropout(mesh_);
      const RecordScope scope(*record);
      at::AutoGradMode grad(true);
      plain_outputs_ = forward_(plain_leaves_);
    }
    for (const auto& t : plain_outputs_) weights_.push_back(weights_like(t));
    at::AutoGradMode grad(true);
    plain_gradients_ = differentiate(*record, plain_leaves_, plain_outputs_, weights_);
    plain_ = *record;
    for (const auto& name : parameter_names()) plain_parameter_names_.push_back(name);
  }

  // Runs `body` and returns its error, if any rank has one. Equal on all ranks.
  std::optional<Difference> try_on_all_ranks(const CallRecord& record, const char* pass,
                                             const std::function<void()>& body) {
    std::string error, path;
    try {
      at::AutoGradMode grad(true);
      body();
    } catch (const std::exception& e) {
      error = message_of(e);
      path = record.running_path();
    }
    const auto text = comm::gather_decide_broadcast(
        group(), kCheck, [&] { return error.empty() ? std::string() : path + "\n" + error; },
        [&](const std::vector<std::string>& texts) {
          for (const auto& each : texts)
            if (!each.empty()) return each;
          return std::string();
        });
    if (text.empty()) return std::nullopt;
    Difference difference;
    difference.module = text.substr(0, text.find('\n'));
    difference.text = c10::str(pass, " of the parallelized model throws: ", text.substr(text.find('\n') + 1));
    difference.event = std::min(record.events.size(), plain_.events.size());
    difference.threw = true;
    return difference;
  }

  // Returns the first comparison that fails on a rank. Else sets `matches` to the placements that hold on all ranks.
  std::optional<Difference> first_failure(const std::vector<Comparison>& comparisons, std::vector<uint64_t>* matches) {
    std::string text;
    for (const auto& c : comparisons) {
      const auto result = compare(c, mesh_);
      text += c10::str(result.matches, " ", result.difference, " ");
    }
    const auto count = comparisons.size();
    const auto decided = comm::gather_decide_broadcast(
        group(), kCheck, [&] { return text; },
        [&](const std::vector<std::string>& texts) {
          std::vector<uint64_t> all(count, ~uint64_t{0});
          std::vector<double> worst(count, 0);
          for (const auto& each : texts) {
            std::istringstream in(each);
            for (size_t i = 0; i < count; i++) {
              uint64_t found = 0;
              std::string difference;
              in >> found >> difference;
              all[i] &= found;
              worst[i] = std::max(worst[i], std::strtod(difference.c_str(), nullptr));
            }
          }
          std::string out;
          for (size_t i = 0; i < count; i++) {
            if (all[i] == 0) return c10::str("failed ", i, "\n", describe(comparisons[i], worst[i]));
            out += std::to_string(all[i]) + " ";
          }
          return out;
        });
    std::istringstream in(decided);
    if (decided.starts_with("failed")) {
      std::string word;
      size_t i = 0;
      in >> word >> i;
      return Difference{comparisons[i].module, decided.substr(decided.find('\n') + 1), comparisons[i].event, false};
    }
    if (matches) {
      matches->resize(count);
      for (auto& each : *matches) in >> each;
    }
    return std::nullopt;
  }

  // Called on the first rank of the mesh.
  static std::string describe(const Comparison& c, double worst) {
    std::ostringstream text;
    text << c.what << " differs from that of the plain module: ";
    if (is_dtensor(c.found))
      text << "it is " << DTensor(c.found.detach()) << ", ";
    else
      text << "it has sizes " << c.found.sizes() << " on the first rank, ";
    if (is_dtensor(c.found)) {
      text << "where the plain module has " << c.plain.sizes();
    } else if (c.allowed.size() == 1) {
      text << "but should be "
           << (c.allowed[0].is_replicate() ? "equal to" : "the shard " + to_string(c.allowed[0]) + " of")
           << " the plain tensor " << c.plain.sizes();
    } else {
      text << "and is neither equal to the plain tensor " << c.plain.sizes() << " nor a shard of it";
    }
    if (std::isfinite(worst)) text << "; the largest difference is " << worst << " of the largest value";
    return text.str();
  }

  // ---- the comparison of two runs ----

  // The placements that a plain tensor at an event may have.
  std::vector<Placement> allowed_at(const CallEvent& event, size_t i, const std::map<std::string, ModulePlan>& plans,
                                    int64_t dims) const {
    const auto plan = plans.find(event.path);
    if (plan != plans.end()) {
      const auto declared = event.is_output ? declared_outputs(plan->second) : declared_inputs(plan->second);
      const bool by_position = declared.size() > 1;
      // A style for one tensor applies to the first input and to all outputs.
      if (!declared.empty() && (by_position ? i < declared.size() : i == 0 || event.is_output))
        if (const auto& layout = declared[by_position ? i : 0]) return {*layout};
    }
    std::vector<Placement> allowed{Replicate()};
    for (int64_t d = 0; d < dims; d++) allowed.push_back(Shard(d));
    for (const auto& [path, each] : plans)
      for (const auto& sharding : {each.output_sharding, each.input_sharding})
        if (sharding.is_sharded() && dims > 0 && allowed.size() < 60) allowed.push_back(sharding.with_dim(dims - 1));
    return allowed;
  }

  std::optional<Difference> other_calls(const CallRecord& record) const {
    const auto name = [](const CallRecord& r, size_t i) {
      return i < r.events.size() ? c10::str(r.events[i].is_output ? "returns from '" : "calls '", r.events[i].path, "'")
                                 : std::string("ends");
    };
    const auto& events = record.events;
    for (size_t i = 0; i < std::max(events.size(), plain_.events.size()); i++) {
      if (i < events.size() && i < plain_.events.size() && events[i].path == plain_.events[i].path &&
          events[i].is_output == plain_.events[i].is_output &&
          events[i].values.size() == plain_.events[i].values.size())
        continue;
      const auto& at = i < plain_.events.size() ? plain_.events[i].path : events[i].path;
      return Difference{at,
                        c10::str("the parallelized model ", name(record, i), " where the plain model ", name(plain_, i),
                                 "; its forward must not depend on local sizes"),
                        std::min(i, plain_.events.size()), false};
    }
    return std::nullopt;
  }

  std::string last_planned(const std::map<std::string, ModulePlan>& plans, const CallRecord& record) const {
    for (auto e = record.events.rbegin(); e != record.events.rend(); ++e)
      if (e->is_output && plans.contains(e->path)) return e->path;
    return "";
  }

  // The first difference of a run with this plan; nullopt if all values agree. Equal on all ranks. Throws if the plan
  // cannot be applied.
  std::optional<Difference> find_difference(const Plan& plan) {
    snapshot_->begin_trial();
    std::map<std::string, ModulePlan> plans;
    for (auto& each : resolve_plan(model_, mesh_, plan)) plans.emplace(each.path, each);
    parallelize_module(model_, mesh_, plan);
    const auto record = record_calls(model_);
    auto inputs = leaves(false);
    snapshot_->restore_random_states();
    Tensors outputs;
    auto difference = try_on_all_ranks(*record, "forward", [&] {
      const RecordScope scope(*record);
      outputs = forward_(inputs);
    });
    found_views_ = record->views;
    if (difference) return difference;
    difference = decide_other_calls(*record);
    if (difference) return difference;

    std::vector<Comparison> comparisons;
    std::vector<std::pair<size_t, size_t>> events;  // (event, tensor) of each comparison
    for (size_t e = 0; e < plain_.events.size(); e++) {
      const auto& expected = plain_.events[e];
      const auto& found = record->events[e];
      for (size_t i = 0; i < expected.values.size(); i++) {
        if (!expected.values[i].defined() || !found.values[i].defined()) continue;
        const auto what = c10::str(expected.is_output ? "its output" : "its input",
                                   expected.values.size() > 1 ? c10::str(" ", i) : std::string());
        comparisons.push_back({expected.path, what, e, expected.values[i], found.values[i],
                               allowed_at(expected, i, plans, expected.values[i].dim())});
        events.emplace_back(e, i);
      }
    }
    const auto module_comparisons = comparisons.size();
    const auto last = last_planned(plans, *record);
    for (size_t i = 0; i < plain_outputs_.size(); i++)
      if (plain_outputs_[i].defined())
        comparisons.push_back({last,
                               c10::str("the result ", i, " of the model"),
                               plain_.events.size(),
                               plain_outputs_[i].detach(),
                               outputs[i].detach(),
                               {Replicate()}});
    std::vector<uint64_t> matches;
    difference = first_failure(comparisons, &matches);
    if (difference) return difference;

    RunGradients gradients;
    difference = try_on_all_ranks(*record, "backward", [&] {
      Tensors weights;
      for (size_t i = 0; i < outputs.size(); i++) weights.push_back(seed_of(outputs[i], weights_[i]));
      gradients = differentiate(*record, inputs, outputs, weights);
    });
    if (difference) return difference;

    std::map<std::pair<size_t, size_t>, std::vector<Placement>> placements;  // of the outputs of modules
    for (size_t c = 0; c < module_comparisons; c++)
      for (size_t i = 0; i < comparisons[c].allowed.size(); i++)
        if (matches[c] >> i & 1) placements[events[c]].push_back(comparisons[c].allowed[i]);
    return first_failure(gradient_comparisons(gradients, placements), nullptr);
  }

  std::optional<Difference> decide_other_calls(const CallRecord& record) {
    const auto mine = other_calls(record);
    const auto text = comm::gather_decide_broadcast(
        group(), kCheck,
        [&] { return mine ? c10::str(mine->event, " ", mine->module, "\n", mine->text) : std::string(); },
        [&](const std::vector<std::string>& texts) {
          for (const auto& each : texts)
            if (!each.empty()) return each;
          return std::string();
        });
    if (text.empty()) return std::nullopt;
    const auto space = text.find(' '), line = text.find('\n');
    return Difference{text.substr(space + 1, line - space - 1), text.substr(line + 1),
                      static_cast<size_t>(std::stoul(text)), false};
  }

  // The gradient of sum(output * weights), with the placements that `output` needs.
  at::Tensor seed_of(const at::Tensor& output, const at::Tensor& weights) const {
    if (!output.defined() || !is_dtensor(output)) return weights;
    const DTensor d(output.detach());
    Placements placements(d.placements().begin(), d.placements().end());
    for (auto& p : placements)
      if (p.is_partial()) p = Replicate();
    return distribute_tensor(weights, d.device_mesh(), placements, {.src_data_rank = std::nullopt});
  }

  // In the order of backward: the gradient of a module's output, then those of its own parameters.
  std::vector<Comparison> gradient_comparisons(
      const RunGradients& found, const std::map<std::pair<size_t, size_t>, std::vector<Placement>>& placements) const {
    double scale = 0;
    for (const auto& g : plain_gradients_.parameters) scale = std::max(scale, largest_of(g));
    std::vector<Comparison> comparisons;
    std::vector<bool> done(plain_parameter_names_.size());
    const auto add = [&](const std::string& module, const std::string& what, size_t event, const at::Tensor& plain,
                         const at::Tensor& other, const std::vector<Placement>& allowed) {
      if (!plain.defined() && !other.defined()) return;
      const auto zero = [](const at::Tensor& like, const at::Tensor& sizes) {
        return like.defined() ? like.detach() : at::zeros(sizes.sizes(), sizes.options());
      };
      if (!plain.defined() && is_dtensor(other)) return;  // unused in the plain run; zero here
      comparisons.push_back(
          {module, what, event, zero(plain, other), other.defined() ? other.detach() : other, allowed, scale});
      if (!other.defined()) comparisons.back().found = at::zeros_like(plain);
    };
    const auto add_parameters = [&](const std::string& module, size_t event) {
      for (size_t i = 0; i < done.size(); i++) {
        const auto& name = plain_parameter_names_[i];
        const auto dot = name.rfind('.');
        if (done[i] || (dot == name.npos ? "" : name.substr(0, dot)) != module) continue;
        done[i] = true;
        add(module, c10::str("the gradient of its ", name.substr(dot == name.npos ? 0 : dot + 1)), event,
            plain_gradients_.parameters.empty() ? at::Tensor() : plain_gradients_.parameters[i],
            found.parameters.empty() ? at::Tensor() : found.parameters[i], {Replicate()});
      }
    };
    for (size_t e = plain_.events.size(); e-- > 0;) {
      const auto& event = plain_.events[e];
      if (!event.is_output) {
        add_parameters(event.path, e);
        continue;
      }
      for (size_t i = 0; i < plain_gradients_.outputs[e].size(); i++) {
        const auto at = placements.find({e, i});
        const auto &plain = plain_gradients_.outputs[e][i], &other = found.outputs[e][i];
        // A gradient that one run does not compute cannot be compared: the output is not used, or not differentiable.
        if (plain.defined() && other.defined() && (is_dtensor(other) || at != placements.end()))
          add(event.path, "the gradient of its output", e, plain, other,
              at == placements.end() ? std::vector<Placement>{} : at->second);
      }
    }
    for (size_t i = 0; i < done.size(); i++) {
      const auto dot = plain_parameter_names_[i].rfind('.');
      if (!done[i]) add_parameters(dot == std::string::npos ? "" : plain_parameter_names_[i].substr(0, dot), 0);
    }
    for (size_t i = 0; i < plain_gradients_.inputs.size(); i++)
      add(plain_.events.empty() ? "" : plain_.events.front().path,
          c10::str("the gradient of input ", i, " of the model"), 0, plain_gradients_.inputs[i], found.inputs[i],
          {Replicate()});
    return comparisons;
  }

  // ---- what to write instead ----

  [[noreturn]] void fail(const Difference& difference) {
    const auto views = found_views_;
    std::vector<std::string> before;  // last first
    for (size_t e = std::min(difference.event, plain_.events.size()); e-- > 0;)
      if (plain_.events[e].is_output && plain_.events[e].path != difference.module)
        before.push_back(plain_.events[e].path);
    const auto found = c10::str(name_of(difference.module), ": ", difference.text);
    for (const auto& repair : plan_repairs(model_, plan_, difference.module, before)) {
      if (!passes(repair.plan)) continue;
      TESSERA_FAIL(UsageError, kCheck, ": ", name_of(repair.entry), ": ", repair.advice,
                   ". With this plan the check passes. Found with the given plan: ", found);
    }
    if (const auto view = view_advice(plain_.views, views, difference.threw))
      TESSERA_FAIL(UsageError, kCheck, ": ", name_of(view->path), ": ", view->advice, ". Found: ", found);
    TESSERA_FAIL(UsageError, kCheck, ": ", found,
                 before.empty() || difference.threw
                     ? std::string()
                     : c10::str(". Its values agree up to the output of '", before.front(),
                                "': check the style of the module, and the code between both"));
  }

  static std::string name_of(const std::string& path) {
    return path.empty() ? std::string("the model") : c10::str("module '", path, "'");
  }

  bool passes(const Plan& plan) {
    try {
      return !find_difference(plan);
    } catch (const UsageError&) {  // cannot be applied; the same on all ranks
      return false;
    }
  }

  Module& model_;
  const DeviceMesh& mesh_;
  const Plan& plan_;
  const Tensors& inputs_;
  const ForwardCall& forward_;
  ModelSnapshot* snapshot_ = nullptr;

  CallRecord plain_;
  Tensors plain_leaves_, plain_outputs_, weights_;
  RunGradients plain_gradients_;
  std::vector<std::string> plain_parameter_names_;
  std::vector<ViewCall> found_views_;
};

}  // namespace

void check_parallel(Module& model, const DeviceMesh& mesh, const Plan& plan, const Tensors& inputs,
                    const ForwardCall& forward) {
  ParallelCheck(model, mesh, plan, inputs, forward).run();
}

}  // namespace tessera
