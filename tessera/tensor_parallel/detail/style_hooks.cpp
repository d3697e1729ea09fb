#include "tessera/tensor_parallel/detail/style_hooks.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/module_name.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/detail/shard.h"

namespace tessera {
namespace {

using torch::nn::Module;

// One input or output on its way through a hook.
struct Step {
  Placement from;        // of a plain tensor
  Placement to;          // what the module, or its caller, gets
  bool local = false;    // as a plain tensor
  int64_t last_dim = 0;  // not 0: the size of the whole last dim, of which `from` has a piece
  const char* what = "input";
};

// This rank's piece of a tensor whose last dim is known. Without that, pieces are taken to be equal.
at::Tensor annotate(const at::Tensor& t, const DeviceMesh& mesh, const Step& step) {
  const auto from = normalize({step.from}, t.dim())[0];
  if (!from.is_sharded(t.dim() - 1) || step.last_dim == 0) return DTensor::from_local(t, mesh, {from});
  const auto n = mesh.size(), rank = mesh.get_coordinate()->at(0);
  const auto expected = shard_size(from, step.last_dim, n, rank);
  TESSERA_CHECK(t.size(-1) == expected, UsageError, "the ", step.what, in_module(), " is said to be ", step.from,
                ", so this rank's piece has ", expected, " of ", step.last_dim, " features; it has ", t.size(-1),
                t.size(-1) == step.last_dim ? ": the whole. Pass this rank's piece, or say input_layouts = Replicate()"
                                            : ". Is the module before it cut in the same way?");
  auto sizes = t.sizes().vec();
  sizes.at(t.dim() - 1) = step.last_dim;
  const auto strides = tessera::contiguous_strides(sizes);
  return DTensor::from_local(t, mesh, {from},
                             {.shape = sizes, .stride = std::vector<int64_t>(strides.begin(), strides.end())});
}

at::Tensor prepare(const at::Tensor& t, const DeviceMesh& mesh, const Step& step) {
  if (!t.defined()) return t;
  auto moved = is_dtensor(t) ? t : annotate(t, mesh, step);
  const DTensor dtensor(moved);
  TESSERA_CHECK(dtensor.device_mesh() == mesh, UsageError, "the ", step.what, in_module(), " lies on ",
                dtensor.device_mesh(), "; its style is for ", mesh);
  const auto to = normalize({step.to}, t.dim())[0];
  if (dtensor.placements()[0] != to) moved = dtensor.redistribute({to});
  return step.local ? DTensor(moved).to_local() : moved;
}

// By position, as the Prepare styles list them.
Replacement prepare_all(const Tensors& tensors, const DeviceMesh& mesh, const Layouts& from, const Layouts& to,
                        bool local, int64_t features, const char* what) {
  TESSERA_CHECK(tensors.size() == from.size(), UsageError, "the style", in_module(), " lists ", from.size(),
                " layouts of ", what, "s, and the module has ", tensors.size(), " tensor ", what,
                "s; give one for each, _ for one that is left alone");
  Tensors prepared = tensors;
  for (size_t i = 0; i < tensors.size(); i++) {
    if (!from[i]) continue;
    prepared[i] = prepare(tensors[i], mesh, {*from[i], to[i].value_or(*from[i]), local, features, what});
  }
  return prepared;
}

void hook_input(Module& module, const DeviceMesh& mesh, Step step) {
  register_forward_pre_hook(module, [mesh, step](Module&, const Tensors& inputs) -> Replacement {
    TESSERA_CHECK(!inputs.empty(), UsageError, "the style", in_module(), " wants a tensor input, and there is none");
    Tensors prepared = inputs;
    prepared[0] = prepare(inputs[0], mesh, step);
    return prepared;
  });
}
void hook_output(Module& module, const DeviceMesh& mesh, Step step) {
  step.what = "output";
  register_forward_hook(module, [mesh, step](Module&, const Tensors&, const Tensors& outputs) -> Replacement {
    Tensors prepared = outputs;
    for (auto& t : prepared) t = prepare(t, mesh, step);
    return prepared;
  });
}

// S(-1) means the features as this module cuts them: heads in one piece, sections each by itself.
Placement features_as(const Placement& layout, const Placement& cut) {
  return layout == Shard(-1) && cut.is_sharded() ? cut : layout;
}

Layouts features_as(Layouts layouts, const Placement& cut) {
  for (auto& layout : layouts.each)
    if (layout) layout = features_as(*layout, cut);
  return layouts;
}

struct Attach {
  Module& module;
  const DeviceMesh& mesh;
  const ModulePlan& work;

  void operator()(const ColwiseParallel& s) const {
    hook_input(module, mesh, {s.input_layouts, Replicate()});
    const auto out = features_as(s.output_layouts, work.output_sharding);
    hook_output(module, mesh, {out, out, s.use_local_output});
  }
  void operator()(const RowwiseParallel& s) const {
    const auto in = features_as(s.input_layouts, work.input_sharding);
    const auto wanted = work.input_sharding.is_sharded() ? work.input_sharding : Replicate();
    hook_input(module, mesh, {in, wanted, false, work.in_features});
    hook_output(module, mesh, {s.output_layouts, s.output_layouts, s.use_local_output});
  }
  void operator()(const SequenceParallel& s) const {
    const auto cut = Shard(s.sequence_dim);
    hook_input(module, mesh, {cut, cut});
    if (s.use_local_output) hook_output(module, mesh, {cut, cut, true});
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

  void inputs(const Layouts& given, const Layouts& wanted, bool local) const {
    const auto from = features_as(given, work.input_sharding), to = features_as(wanted, work.input_sharding);
    register_forward_pre_hook(
        module, [mesh = mesh, from, to, local, features = work.in_features](Module&, const Tensors& seen) {
          return prepare_all(seen, mesh, from, to, local, features, "input");
        });
  }
  void outputs(const Layouts& given, const Layouts& wanted, bool local) const {
    const auto from = features_as(given, work.output_sharding), to = features_as(wanted, work.output_sharding);
    register_forward_hook(module, [mesh = mesh, from, to, local, features = work.in_features](Module&, const Tensors&,
                                                                                              const Tensors& seen) {
      return prepare_all(seen, mesh, from, to, local, features, "output");
    });
  }
};

}  // namespace

void attach_style_hooks(Module& module, const DeviceMesh& mesh, const ModulePlan& work) {
  std::visit(Attach{module, mesh, work}, work.style);
}

void attach_dropout_hooks(Module& module, const DeviceMesh& mesh) {
  register_around_hook(module, [mesh](Module&, const Tensors& inputs, const ForwardCall& forward) {
    if (is_dtensor(inputs[0])) return forward(inputs);
    return Tensors{DTensor(forward({DTensor::from_local(inputs[0], mesh)})[0]).to_local()};
  });
}

}  // namespace tessera
