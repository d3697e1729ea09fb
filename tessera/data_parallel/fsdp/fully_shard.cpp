#include "tessera/data_parallel/fsdp/fully_shard.h"

#include "tessera/base/detail/warn_once.h"
#include "tessera/base/error.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/data_parallel/fsdp/detail/api/ignored_modules.h"
#include "tessera/data_parallel/fsdp/detail/api/parameter_ownership.h"
#include "tessera/data_parallel/fsdp/detail/engine/joint_spec.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/fsdp/detail/engine/unhooked_modules.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/module_tree.h"

#include <algorithm>
#include <unordered_set>

namespace tessera::data_parallel::fsdp {
namespace {

constexpr const char* kFullyShard = "fully_shard";

void check_modules(const std::vector<Module*>& modules) {
  TESSERA_CHECK(!modules.empty(), UsageError, kFullyShard, ": no modules are given");
  for (size_t i = 0; i < modules.size(); i++) {
    const auto name = class_name(*modules[i]);
    TESSERA_CHECK(!is_module_container(*modules[i]), UsageError, kFullyShard, ": a ", name,
                  " has no forward, so nothing would all-gather its parameters; call fully_shard for each module in ",
                  "it, or for a list of them as one group");
    TESSERA_CHECK(std::find(modules.begin(), modules.begin() + static_cast<ptrdiff_t>(i), modules[i]) ==
                      modules.begin() + static_cast<ptrdiff_t>(i),
                  UsageError, kFullyShard, ": ", name, " is in the list twice");
    TESSERA_CHECK(!find_sharded_module(*modules[i]), UsageError, kFullyShard, ": ", name, " is sharded already");
  }
}

// Parameters that are neither ignored nor in a group.
NamedTensors parameters_without_group(const std::vector<Module*>& modules, const std::vector<at::Tensor>& ignored) {
  std::unordered_set<const void*> excluded;
  for (const auto& t : ignored) excluded.insert(t.unsafeGetTensorImpl());
  for (const auto* module : modules)
    for (const auto& sharded : find_sharded_modules(*module)) {
      const auto& group = sharded->group();
      if (group.flat_param().defined()) excluded.insert(group.flat_param().unsafeGetTensorImpl());
      for (const auto& param : group.params()) excluded.insert(param.tensor.unsafeGetTensorImpl());
      excluded.insert(sharded->unhooked_params.begin(), sharded->unhooked_params.end());
    }
  NamedTensors found;
  for (size_t m = 0; m < modules.size(); m++)
    for (const auto& [name, value] : parameters_of(*modules[m])) {
      if (!excluded.insert(value.unsafeGetTensorImpl()).second) continue;
      found.push_back({modules.size() == 1 ? name : c10::str(m, ".", name), value});
    }
  return found;
}

int64_t shard_dim(const std::string& name, const at::Tensor& value, const FullyShardOptions& options) {
  TESSERA_CHECK(value.dim() > 0, UsageError, kFullyShard, ": parameter ", name,
                " is a scalar, which cannot be sharded; give it a dim of size 1, or put it into ignored_params");
  const auto dim = options.shard_placement_fn ? options.shard_placement_fn(value).value_or(0) : 0;
  TESSERA_CHECK(dim >= -value.dim() && dim < value.dim(), UsageError, kFullyShard, ": parameter ", name, " of shape ",
                value.sizes(), " has no dim ", dim);
  return dim < 0 ? dim + value.dim() : dim;
}

SpecRef sharded_spec(const std::string& name, const at::Tensor& value, const DeviceMesh& mesh, int64_t dim,
                     const OffloadPolicy& offload) {
  // A parameter without values yet gets them on the mesh's device.
  const auto device = offload.offload   ? c10::Device(at::kCPU)
                      : value.is_meta() ? c10::Device(mesh.device_type())
                                        : value.device();
  if (is_dtensor(value)) {
    const auto spec = joint_spec(name, DTensor(value).spec(), mesh, dim);
    return intern(spec->mesh, spec->placements, spec->sizes, spec->strides, spec->dtype, device);
  }
  Placements placements(static_cast<size_t>(mesh.ndim()), Replicate());
  placements.back() = Shard(dim);
  return intern(mesh, placements, value.sizes(), tessera::contiguous_strides(value.sizes()), value.scalar_type(),
                device);
}

struct GroupPlan {
  std::vector<FSDPParam> params;
  std::vector<ParamShape> shapes;
};

GroupPlan plan_group(const NamedTensors& parameters, const DeviceMesh& mesh, const FullyShardOptions& options) {
  GroupPlan plan;
  for (const auto& [name, value] : parameters) {
    const auto& first = parameters[0];
    TESSERA_CHECK(value.scalar_type() == first.value.scalar_type(), UsageError, kFullyShard, ": parameter ", name,
                  " is ", value.scalar_type(), " and ", first.name, " is ", first.value.scalar_type(),
                  "; a parameter group has one dtype. Convert one, or shard the modules separately");
    TESSERA_CHECK(value.is_meta() == first.value.is_meta(), UsageError, kFullyShard, ": parameter ",
                  value.is_meta() ? name : first.name, " has no values yet, and ", value.is_meta() ? first.name : name,
                  " has; build the entire module inside deferred_init");
    const auto dim = shard_dim(name, value, options);
    auto spec = sharded_spec(name, value, mesh, dim, options.offload_policy);
    plan.shapes.push_back({local_or_self(value).sizes().vec(), dim});
    plan.params.push_back(
        {name, value, is_dtensor(value) ? tessera::detail::meta_of(value).spec : SpecRef(), std::move(spec)});
  }
  return plan;
}

// For modules that cannot have hooks: shards by placement only.
void shard_without_hooks(const std::vector<Module*>& modules, const std::vector<FSDPParam>& params,
                         std::shared_ptr<ScheduledGroup> scheduled, const FullyShardOptions& options) {
  const auto name = class_name(*modules[0]);
  const auto holder = c10::str("a Tessera holder (tessera::nn::", name, ", or TESSERA_MODULE(", name, "))");
  const auto& policy = options.mp_policy;
  TESSERA_CHECK(!policy.param_dtype && !policy.reduce_dtype && !policy.output_dtype && !options.offload_policy.offload,
                UsageError, kFullyShard, ": ", name,
                " cannot have hooks, and mp_policy and offload_policy need them; make it by ", holder);
  for (const auto& param : params)
    TESSERA_CHECK(!param.unsharded_spec && !param.tensor.is_meta(), UsageError, kFullyShard, ": parameter ", param.name,
                  " is ", param.unsharded_spec ? param.unsharded_spec->describe() : "not filled yet", ", and ", name,
                  " cannot have hooks, which that needs; make it by ", holder);
  warn_once(c10::str("fully_shard/", name),
            c10::str("fully_shard: ", name, " cannot have hooks, so each of its parameters is all-gathered where it ",
                     "is used. To all-gather them together and to prefetch them, make it by ", holder));
  scheduled->group = std::make_shared<ParamGroup>(name, std::vector<FSDPParam>(), ShardLayout::per_parameter({}, 1),
                                                  World::current().shared_group({World::current().rank()}),
                                                  comm::Group(), ParamGroupOptions());
  auto sharded = register_modules(modules, std::move(scheduled), /*keep_alive=*/true);
  for (const auto& param : params) sharded->unhooked_params.push_back(param.tensor.unsafeGetTensorImpl());
  shard_unhooked_params(params, sharded->scheduled);
}

void shard_modules(const std::vector<Module*>& modules, const FullyShardOptions& options) {
  check_modules(modules);
  const auto parameters = parameters_without_group(modules, options.ignored_params);
  const auto mesh =
      options.mesh ? options.mesh : init_device_mesh(device_type_of(parameters), {World::current().size()}, {"dp"});
  TESSERA_CHECK(mesh.ndim() <= 2, UsageError, kFullyShard, ": mesh ", mesh, " has ", mesh.ndim(),
                " axes; give one to shard over, or two to replicate and shard over");
  const auto shard_group = mesh.get_group(mesh.ndim() - 1);
  const auto replicate_group = mesh.ndim() == 2 ? mesh.get_group(0) : comm::Group();
  auto scheduled = std::make_shared<ScheduledGroup>();
  options.reshard_after_forward.apply(*scheduled, shard_group);
  for (const auto* module : modules) check_not_owned(kFullyShard, *module, parameters);
  auto [params, shapes] = plan_group(parameters, mesh, options);
  if (!std::all_of(modules.begin(), modules.end(), [](const Module* module) { return has_hook_point(*module); }))
    return shard_without_hooks(modules, params, std::move(scheduled), options);
  const auto& policy = options.mp_policy;
  if (policy.cast_forward_inputs) scheduled->cast_inputs = policy.param_dtype;
  scheduled->cast_outputs = policy.output_dtype;
  scheduled->group = std::make_shared<ParamGroup>(class_name(*modules[0]), std::move(params),
                                                  ShardLayout::per_parameter(std::move(shapes), shard_group->size()),
                                                  shard_group, replicate_group,
                                                  ParamGroupOptions{.param_dtype = policy.param_dtype,
                                                                    .reduce_dtype = policy.reduce_dtype,
                                                                    .offload = options.offload_policy.offload,
                                                                    .pin_memory = options.offload_policy.pin_memory});
  attach(modules, std::move(scheduled));
}

}  // namespace
}  // namespace tessera::data_parallel::fsdp

namespace tessera {

torch::nn::Module& fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  data_parallel::fsdp::shard_modules({&module}, options);
  return module;
}

std::vector<std::shared_ptr<torch::nn::Module>> fully_shard(
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options) {
  std::vector<torch::nn::Module*> given;
  for (const auto& module : modules) given.push_back(module.get());
  data_parallel::fsdp::shard_modules(given, options);
  return modules;
}

}  // namespace tessera
