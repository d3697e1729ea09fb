#include "tessera/tensor_parallel/detail/style_hooks.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/detail/shard.h"
#include "tessera/tensor_parallel/detail/plain_dropout.h"

namespace tessera {
namespace {

using torch::nn::Module;

// What a hook does with one input or output.
struct LayoutChange {
  Placement from;        // the placement of a plain tensor
  Placement to;          // the placement that the module, or its caller, receives
  bool local = false;    // pass on the local tensor, not the DTensor
  int64_t last_dim = 0;  // the global size of the last dim if `from` shards it; 0: unknown, local sizes are equal
  const char* what = "input";
  // Whether the ranks have compared the sizes of a plain tensor. Shared by the calls of one hook.
  std::shared_ptr<bool> compared = std::make_shared<bool>(false);
};

// Plain tensors that are sharded must have equal sizes on all ranks; otherwise each rank would assume another global
// size. The ranks compare the sizes in the first call. All ranks must make the same calls, so a later size of one rank
// alone cannot start a comparison: then the first collective fails, with the context that redistribute_value() adds.
void compare_local_sizes(const at::Tensor& t, const DeviceMesh& mesh, const LayoutChange& change) {
  if (*change.compared) return;
  comm::require_same_on_all_ranks(
      mesh.get_group(),
      c10::str("the ", change.what, in_module(), " has the layout ", change.from,
               ", so plain tensors must have equal sizes on all ranks. For uneven shards pass a DTensor: ",
               "use_local_output = false in the style before it, or DTensor::from_local with shape and stride"),
      {c10::str(t.sizes())});
  *change.compared = true;
}

at::Tensor redistribute_value(const DTensor& t, const Placement& to, const LayoutChange& change) {
  try {
    if (change.local && !to.is_partial()) return detail::redistribute_to_local(t, {to});
    const auto moved = t.redistribute({to});
    return change.local ? moved.to_local() : at::Tensor(moved);
  } catch (c10::Error& error) {
    error.add_context(c10::str("the ", change.what, in_module(), ", ", t.spec().describe(),
                               ", was being redistributed to ", to, ". A plain tensor with the layout ", change.from,
                               " must have equal sizes on all ranks"));
    throw;
  }
}

// Makes a DTensor of a local tensor.
at::Tensor from_local(const at::Tensor& t, const DeviceMesh& mesh, const LayoutChange& change) {
  const auto from = normalize({change.from}, t.dim())[0];
  if (!from.is_sharded(t.dim() - 1) || change.last_dim == 0) {
    if (from.is_sharded()) compare_local_sizes(t, mesh, change);
    return DTensor::from_local(t, mesh, {from});
  }
  const auto n = mesh.size(), rank = mesh.get_coordinate()->at(0);
  const auto expected = shard_size(from, change.last_dim, n, rank);
  TESSERA_CHECK(t.size(-1) == expected, UsageError, "the ", change.what, in_module(), " has the layout ", change.from,
                ", so the local tensor needs ", expected, " of ", change.last_dim, " features; it has ", t.size(-1),
                t.size(-1) == change.last_dim
                    ? ", the global size. Pass the local shard, or use input_layouts = Replicate()"
                    : ". Check that the previous module shards its features in the same way");
  auto sizes = t.sizes().vec();
  sizes.at(t.dim() - 1) = change.last_dim;
  const auto strides = tessera::contiguous_strides(sizes);
  return DTensor::from_local(t, mesh, {from},
                             {.shape = sizes, .stride = std::vector<int64_t>(strides.begin(), strides.end())});
}

at::Tensor prepare(const at::Tensor& t, const DeviceMesh& mesh, const LayoutChange& change) {
  if (!t.defined()) return t;
  note_style_runs(mesh);
  auto moved = is_dtensor(t) ? t : from_local(t, mesh, change);
  const DTensor dtensor(moved);
  TESSERA_CHECK(dtensor.device_mesh() == mesh, UsageError, "the ", change.what, in_module(), " is on ",
                dtensor.device_mesh(), ", but its style is for ", mesh, "; distribute it over the same mesh");
  const auto to = normalize({change.to}, t.dim())[0];
  if (!change.local && dtensor.placements()[0] == to) return moved;
  const auto result = redistribute_value(dtensor, to, change);
  if (change.local) note_local_tensor(result, to);
  return result;
}

// Changes the tensors by position, as the Prepare styles list them.
Replacement prepare_all(const Tensors& tensors, const DeviceMesh& mesh, const Layouts& from, const Layouts& to,
                        bool local, int64_t features, const char* what, const std::shared_ptr<bool>& compared) {
  TESSERA_CHECK(tensors.size() == from.size(), UsageError, "the style", in_module(), " has ", from.size(), " ", what,
                " layouts, but the module has ", tensors.size(), " tensor ", what,
                "s; write one layout for each, _ to leave one unchanged");
  Tensors prepared = tensors;
  for (size_t i = 0; i < tensors.size(); i++) {
    if (!from[i]) continue;
    // One flag for all tensors of the first call.
    const auto flag = *compared ? compared : std::make_shared<bool>(false);
    prepared[i] = prepare(tensors[i], mesh, {*from[i], to[i].value_or(*from[i]), local, features, what, flag});
  }
  *compared = true;
  return prepared;
}

void hook_input(Module& module, const DeviceMesh& mesh, LayoutChange change) {
  register_forward_pre_hook(module, [mesh, change](Module&, const Tensors& inputs) -> Replacement {
    TESSERA_CHECK(!inputs.empty(), UsageError, "the style", in_module(),
                  " needs a tensor input, but the module has none");
    Tensors prepared = inputs;
    prepared[0] = prepare(inputs[0], mesh, change);
    return prepared;
  });
}
void hook_output(Module& module, const DeviceMesh& mesh, LayoutChange change) {
  change.what = "output";
  register_forward_hook(module, [mesh, change](Module&, const Tensors&, const Tensors& outputs) -> Replacement {
    Tensors prepared = outputs;
    for (auto& t : prepared) t = prepare(t, mesh, change);
    return prepared;
  });
}

// Replaces S(-1) by the feature sharding of the module, which may have blocks or sections.
Placement with_sharding(const Placement& layout, const Placement& sharding) {
  return layout == Shard(-1) && sharding.is_sharded() ? sharding : layout;
}

Layouts with_sharding(Layouts layouts, const Placement& sharding) {
  for (auto& layout : layouts.each)
    if (layout) layout = with_sharding(*layout, sharding);
  return layouts;
}

struct StyleHooks {
  Module& module;
  const DeviceMesh& mesh;
  const ModulePlan& plan;

  void operator()(const ColwiseParallel& s) const {
    hook_input(module, mesh, {s.input_layouts, Replicate()});
    const auto out = with_sharding(s.output_layouts, plan.output_sharding);
    hook_output(module, mesh, {out, out, s.use_local_output});
  }
  void operator()(const RowwiseParallel& s) const {
    const auto in = with_sharding(s.input_layouts, plan.input_sharding);
    const auto needed = plan.input_sharding.is_sharded() ? plan.input_sharding : Replicate();
    hook_input(module, mesh, {in, needed, false, plan.in_features});
    hook_output(module, mesh, {s.output_layouts, s.output_layouts, s.use_local_output});
  }
  void operator()(const SequenceParallel& s) const {
    const auto sharded = Shard(s.sequence_dim);
    hook_input(module, mesh, {sharded, sharded});
    if (s.use_local_output) hook_output(module, mesh, {sharded, sharded, true});
  }
  void operator()(const PrepareModuleInput& s) const {
    inputs(s.input_layouts, s.desired_input_layouts, s.use_local_output);
  }
  void operator()(const PrepareModuleOutput& s) const {
    outputs(s.output_layouts, s.desired_output_layouts, s.use_local_output);
  }
  void operator()(const PrepareModuleInputOutput& s) const {
    inputs(s.input_layouts, s.desired_input_layouts, s.use_local_input);
    outputs(s.output_layouts, s.desired_output_layouts, s.use_local_output);
  }

  void inputs(const Layouts& given, const Layouts& desired, bool local) const {
    const auto from = with_sharding(given, plan.input_sharding), to = with_sharding(desired, plan.input_sharding);
    register_forward_pre_hook(module, [mesh = mesh, from, to, local, features = plan.in_features,
                                       compared = std::make_shared<bool>(false)](Module&, const Tensors& tensors) {
      return prepare_all(tensors, mesh, from, to, local, features, "input", compared);
    });
  }
  void outputs(const Layouts& given, const Layouts& desired, bool local) const {
    const auto from = with_sharding(given, plan.output_sharding), to = with_sharding(desired, plan.output_sharding);
    register_forward_hook(
        module, [mesh = mesh, from, to, local, features = plan.in_features, compared = std::make_shared<bool>(false)](
                    Module&, const Tensors&, const Tensors& tensors) {
          return prepare_all(tensors, mesh, from, to, local, features, "output", compared);
        });
  }
};

struct DeclaredInputs {
  const ModulePlan& plan;
  Layouts operator()(const ColwiseParallel& s) const { return s.input_layouts; }
  Layouts operator()(const RowwiseParallel& s) const { return with_sharding(s.input_layouts, plan.input_sharding); }
  Layouts operator()(const SequenceParallel& s) const { return Shard(s.sequence_dim); }
  Layouts operator()(const PrepareModuleInput& s) const { return with_sharding(s.input_layouts, plan.input_sharding); }
  Layouts operator()(const PrepareModuleOutput&) const { return {}; }
  Layouts operator()(const PrepareModuleInputOutput& s) const {
    return with_sharding(s.input_layouts, plan.input_sharding);
  }
};

struct DeclaredOutputs {
  const ModulePlan& plan;
  Layouts operator()(const ColwiseParallel& s) const { return with_sharding(s.output_layouts, plan.output_sharding); }
  Layouts operator()(const RowwiseParallel& s) const { return s.output_layouts; }
  Layouts operator()(const SequenceParallel& s) const { return Shard(s.sequence_dim); }
  Layouts operator()(const PrepareModuleInput&) const { return {}; }
  Layouts operator()(const PrepareModuleOutput& s) const { return desired(s.output_layouts, s.desired_output_layouts); }
  Layouts operator()(const PrepareModuleInputOutput& s) const {
    return desired(s.output_layouts, s.desired_output_layouts);
  }
  Layouts desired(Layouts given, const Layouts& wanted) const {
    for (size_t i = 0; i < given.size(); i++)
      if (wanted[i]) given.each[i] = wanted[i];
    return with_sharding(given, plan.output_sharding);
  }
};

}  // namespace

Layouts declared_inputs(const ModulePlan& plan) { return std::visit(DeclaredInputs{plan}, plan.style); }
Layouts declared_outputs(const ModulePlan& plan) { return std::visit(DeclaredOutputs{plan}, plan.style); }

void attach_style_hooks(Module& module, const DeviceMesh& mesh, const ModulePlan& plan) {
  std::visit(StyleHooks{module, mesh, plan}, plan.style);
}

void attach_dropout_hooks(Module& module, const DeviceMesh& mesh) {
  register_around_hook(module, [mesh](Module&, const Tensors& inputs, const ForwardCall& forward) {
    if (is_dtensor(inputs[0])) return forward(inputs);
    const auto input = distributed_dropout_input(inputs[0], "nn::Dropout", mesh);
    return Tensors{DTensor(forward({input})[0]).to_local()};
  });
}

}  // namespace tessera
