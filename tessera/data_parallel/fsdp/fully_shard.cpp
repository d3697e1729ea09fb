#include "tessera/data_parallel/fsdp/fully_shard.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/warn_once.h"
#include "tessera/data_parallel/fsdp/detail/api/parameter_ownership.h"
#include "tessera/data_parallel/fsdp/detail/engine/joint_spec.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/fsdp/detail/engine/unhooked_modules.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/module_tree.h"

#include <algorithm>
#include <unordered_set>

namespace tessera {
namespace {

using namespace data_parallel;
using namespace data_parallel::fsdp;

constexpr const char* kWhat = "fully_shard";

void check_modules(const std::vector<Module*>& modules) {
  TESSERA_CHECK(!modules.empty(), UsageError, kWhat, ": no modules are given");
  for (size_t i = 0; i < modules.size(); i++) {
    const auto name = class_name(*modules[i]);
    TESSERA_CHECK(
        name != "ModuleList" && name != "ModuleDict", UsageError, kWhat, ": a ", name,
        " has no forward, so nothing would gather its parameters; call fully_shard for each module in it, or ",
        "for a list of them as one unit");
    TESSERA_CHECK(std::find(modules.begin(), modules.begin() + static_cast<ptrdiff_t>(i), modules[i]) ==
                      modules.begin() + static_cast<ptrdiff_t>(i),
                  UsageError, kWhat, ": ", name, " is in the list twice");
    TESSERA_CHECK(!find(*modules[i]), UsageError, kWhat, ": ", name, " is sharded already");
  }
}

// Parameters that no unit has yet.
NamedTensors free_parameters(const std::vector<Module*>& modules, const std::vector<at::Tensor>& ignored) {
  std::unordered_set<const void*> taken;
  for (const auto& t : ignored) taken.insert(t.unsafeGetTensorImpl());
  for (const auto* module : modules)
    for (const auto& sharded : find_all(*module)) {
      const auto& unit = *sharded->turn->unit;
      if (unit.flat().defined()) taken.insert(unit.flat().unsafeGetTensorImpl());
      for (const auto& member : unit.members()) taken.insert(member.handle.unsafeGetTensorImpl());
      taken.insert(sharded->unhooked.begin(), sharded->unhooked.end());
    }
  NamedTensors found;
  for (size_t m = 0; m < modules.size(); m++)
    for (const auto& [name, value] : parameters_of(*modules[m])) {
      if (!taken.insert(value.unsafeGetTensorImpl()).second) continue;
      found.push_back({modules.size() == 1 ? name : c10::str(m, ".", name), value});
    }
  return found;
}

int64_t cut_dim(const std::string& name, const at::Tensor& value, const FullyShardOptions& options) {
  TESSERA_CHECK(value.dim() > 0, UsageError, kWhat, ": parameter ", name,
                " is a single number, which cannot be cut; give it a dim of size 1, or put it into ignored_params");
  const auto asked = options.shard_placement_fn ? options.shard_placement_fn(value).value_or(0) : 0;
  TESSERA_CHECK(asked >= -value.dim() && asked < value.dim(), UsageError, kWhat, ": parameter ", name, " of shape ",
                value.sizes(), " has no dim ", asked);
  return asked < 0 ? asked + value.dim() : asked;
}

SpecRef sharded_spec(const std::string& name, const at::Tensor& value, const DeviceMesh& mesh, int64_t dim,
                     const OffloadPolicy& offload) {
  // A parameter without values yet will have them on the mesh's device.
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

struct Cut {
  std::vector<Member> members;
  std::vector<Extent> extents;
};

Cut cut(const NamedTensors& parameters, const DeviceMesh& mesh, const FullyShardOptions& options) {
  Cut cut;
  for (const auto& [name, value] : parameters) {
    const auto& first = parameters[0];
    TESSERA_CHECK(value.scalar_type() == first.value.scalar_type(), UsageError, kWhat, ": parameter ", name, " is ",
                  value.scalar_type(), " and ", first.name, " is ", first.value.scalar_type(),
                  "; a unit has one dtype. Convert one, or shard the modules apart");
    TESSERA_CHECK(value.is_meta() == first.value.is_meta(), UsageError, kWhat, ": parameter ",
                  value.is_meta() ? name : first.name, " has no values yet, and ", value.is_meta() ? first.name : name,
                  " has; build the whole module inside deferred_init");
    const auto dim = cut_dim(name, value, options);
    auto spec = sharded_spec(name, value, mesh, dim, options.offload_policy);
    cut.extents.push_back({local_value(value).sizes().vec(), dim});
    cut.members.push_back(
        {name, value, is_dtensor(value) ? tessera::detail::meta_of(value).spec : SpecRef(), std::move(spec)});
  }
  return cut;
}

// Modules that no hook can be put on: by placements alone.
std::shared_ptr<ShardedModule> shard_without_hooks(const std::vector<Module*>& modules,
                                                   const std::vector<Member>& members, std::shared_ptr<Turn> turn,
                                                   const FullyShardOptions& options) {
  const auto name = class_name(*modules[0]);
  const auto holder = c10::str("a holder of ours (tessera::nn::", name, ", or TESSERA_MODULE(", name, "))");
  const auto& policy = options.mp_policy;
  TESSERA_CHECK(!policy.param_dtype && !policy.reduce_dtype && !policy.output_dtype && !options.offload_policy.offload,
                UsageError, kWhat, ": ", name,
                " cannot have hooks, and mp_policy and offload_policy need them; make it by ", holder);
  for (const auto& member : members)
    TESSERA_CHECK(!member.outer && !member.handle.is_meta(), UsageError, kWhat, ": parameter ", member.name, " is ",
                  member.outer ? member.outer->describe() : "not filled yet", ", and ", name,
                  " cannot have hooks, which that needs; make it by ", holder);
  warn_once(c10::str("fully_shard/", name),
            c10::str("fully_shard: ", name, " cannot have hooks, so its parameters are gathered one by one where they ",
                     "are used. To gather them together and ahead, make it by ", holder));
  turn->unit =
      std::make_shared<Unit>(name, std::vector<Member>(), ShardLayout::per_parameter({}, 1),
                             World::current().shared_group({World::current().rank()}), comm::Group(), UnitOptions());
  auto sharded = list(modules, std::move(turn), /*keep=*/true);
  for (const auto& member : members) sharded->unhooked.push_back(member.handle.unsafeGetTensorImpl());
  shard_unhooked(members, sharded->turn);
  return sharded;
}

FSDPModule shard(const std::vector<Module*>& modules, const FullyShardOptions& options) {
  check_modules(modules);
  const auto mesh = options.mesh ? options.mesh : init_device_mesh("cpu", {World::current().size()}, {"dp"});
  TESSERA_CHECK(mesh.ndim() <= 2, UsageError, kWhat, ": mesh ", mesh, " has ", mesh.ndim(),
                " axes; give one to cut over, or two to copy and cut over");
  const auto shards = mesh.get_group(mesh.ndim() - 1);
  const auto replicas = mesh.ndim() == 2 ? mesh.get_group(0) : comm::Group();
  auto turn = std::make_shared<Turn>();
  options.reshard_after_forward.apply(*turn, shards);
  const auto parameters = free_parameters(modules, options.ignored_params);
  for (const auto* module : modules) check_unclaimed(kWhat, *module, parameters);
  auto [members, extents] = cut(parameters, mesh, options);
  if (!std::all_of(modules.begin(), modules.end(), [](const Module* module) { return has_hook_point(*module); }))
    return FSDPModule(shard_without_hooks(modules, members, std::move(turn), options), *modules[0]);
  const auto& policy = options.mp_policy;
  if (policy.cast_forward_inputs) turn->cast_inputs = policy.param_dtype;
  turn->cast_outputs = policy.output_dtype;
  turn->unit = std::make_shared<Unit>(class_name(*modules[0]), std::move(members),
                                      ShardLayout::per_parameter(std::move(extents), shards->size()), shards, replicas,
                                      UnitOptions{.param_dtype = policy.param_dtype,
                                                  .reduce_dtype = policy.reduce_dtype,
                                                  .offload = options.offload_policy.offload});
  return FSDPModule(attach(modules, std::move(turn)), *modules[0]);
}

}  // namespace

FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  return shard({&module}, options);
}

FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                       const FullyShardOptions& options) {
  std::vector<Module*> given;
  for (const auto& module : modules) given.push_back(module.get());
  return shard(given, options);
}

}  // namespace tessera
