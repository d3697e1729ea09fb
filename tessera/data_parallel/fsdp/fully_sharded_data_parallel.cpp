#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/detail/broadcast.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/data_parallel/fsdp/detail/api/ignored_modules.h"
#include "tessera/data_parallel/fsdp/detail/api/parameter_ownership.h"
#include "tessera/data_parallel/fsdp/detail/engine/trace_state.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/nn/hooks.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <ostream>
#include <unordered_map>

namespace tessera::data_parallel::fsdp {
namespace {

constexpr const char* kFSDP = "FullyShardedDataParallel";
constexpr const char* kFlatName = "flat_param";
constexpr int64_t kAlignBytes = 16;

bool is_hybrid(ShardingStrategy s) {
  return s == ShardingStrategy::HybridShard || s == ShardingStrategy::HybridShardZero2;
}
bool stays_unsharded_after_forward(ShardingStrategy s) {
  return s == ShardingStrategy::ShardGradOp || s == ShardingStrategy::HybridShardZero2 ||
         s == ShardingStrategy::NoShard;
}

struct FSDPGroups {
  comm::Group shard_group, replicate_group;
  DeviceMesh mesh;
  std::optional<int64_t> shard_axis;
};

FSDPGroups groups_from(const FSDPOptions& options, const std::string& device_type) {
  auto mesh = options.device_mesh;
  const auto strategy = options.sharding_strategy;
  TESSERA_CHECK(!mesh || !options.process_group, UsageError, kFSDP,
                ": both device_mesh and process_group are given; give one");
  if (is_hybrid(strategy)) {
    TESSERA_CHECK(mesh && mesh.ndim() == 2, UsageError, kFSDP, ": ", strategy,
                  " needs a device_mesh of two axes, to replicate over and to shard over");
    return {mesh.get_group(1), mesh.get_group(0), mesh, 1};
  }
  TESSERA_CHECK(!mesh || mesh.ndim() == 1, UsageError, kFSDP, ": device_mesh ", mesh, " has ", mesh ? mesh.ndim() : 0,
                " axes; give the one to shard over, or a hybrid strategy");
  if (!mesh) mesh = DeviceMesh::from_group(options.process_group.group(), device_type, "dp");
  if (strategy != ShardingStrategy::NoShard) return {mesh.get_group(), {}, mesh, 0};
  const auto world = World::current();
  return {world.shared_group({world.rank()}), mesh.get_group(), mesh, {}};
}

// A module to wrap, and the parameters and buffers that belong to it.
struct WrapPlan {
  Module* module;
  NamedTensors parameters, buffers;
};

void check_plan(const WrapPlan& plan, const FSDPOptions& options) {
  const auto& [module, parameters, buffers] = plan;
  TESSERA_CHECK(!is_module_container(*module), UsageError, kFSDP, ": ", class_name(*module),
                " is a list of modules and has no forward; wrap the modules in it, or the module around it");
  check_can_attach(kFSDP, *module);
  check_not_owned(kFSDP, *module, parameters);
  for (const auto& [name, value] : parameters) {
    const auto& local = local_or_self(value);
    const auto& first = local_or_self(parameters[0].value);
    TESSERA_CHECK(!local.is_meta() || is_deferred(value), UsageError, kFSDP, ": parameter ", name,
                  " is on the meta device without values; build the module with deferred_init(), or fill it first");
    TESSERA_CHECK(local.dim() > 0, UsageError, kFSDP, ": parameter ", name,
                  " is a scalar, which cannot be sharded; give it a dim of size 1");
    TESSERA_CHECK(at::isFloatingType(local.scalar_type()), UsageError, kFSDP, ": parameter ", name, " is ",
                  local.scalar_type(), ", which cannot have gradients; make it a buffer, or ignore it");
    TESSERA_CHECK(local.scalar_type() == first.scalar_type(), UsageError, kFSDP, ": parameter ", name, " is ",
                  local.scalar_type(), " and ", parameters[0].name, " is ", first.scalar_type(),
                  "; one flat parameter has one dtype: wrap one of their modules separately");
    TESSERA_CHECK(local.device() == first.device() || options.device_id, UsageError, kFSDP, ": parameter ", name,
                  " is on ", local.device(), " and ", parameters[0].name, " on ", first.device(),
                  "; move the module to one device, or give device_id");
    TESSERA_CHECK(options.use_orig_params || value.requires_grad() == parameters[0].value.requires_grad(), UsageError,
                  kFSDP, ": parameter ", name, value.requires_grad() ? " requires" : " does not require",
                  " a gradient, unlike ", parameters[0].name, "; set use_orig_params");
    if (!is_dtensor(value)) continue;
    const auto& spec = DTensor(value).spec();
    TESSERA_CHECK(!spec.has_partial(), UsageError, kFSDP, ": parameter ", name, " is ", DTensor(value),
                  ", which is partial; redistribute it to Replicate or Shard first");
    TESSERA_CHECK(!options.device_mesh || spec.mesh != options.device_mesh, UsageError, kFSDP, ": parameter ", name,
                  " is ", DTensor(value), ", over the same ranks that it is to be sharded over; give another axis");
  }
}

// The module and the inner modules that the policy chooses, inner ones first. Changes nothing.
std::vector<WrapPlan> plan_wrapping(Module& root, const FSDPOptions& options, const IgnoredModules& ignored) {
  std::vector<Module*> modules;
  if (options.auto_wrap_policy) modules = modules_to_wrap(root, options.auto_wrap_policy, ignored);
  modules.push_back(&root);
  auto sharded = fsdp_modules(root);
  std::vector<WrapPlan> plans;
  std::unordered_map<const void*, const Module*> owners;
  for (auto* module : modules) {
    plans.push_back(
        {module, ignored.parameters_to_shard(*module, sharded), ignored.buffers_to_shard(*module, sharded)});
    check_plan(plans.back(), options);
    for (const auto& [name, value] : plans.back().parameters) {
      const auto [at, is_new] = owners.emplace(value.unsafeGetTensorImpl(), module);
      TESSERA_CHECK(is_new, UsageError, kFSDP, ": parameter ", name, " of ", class_name(*module), " is also one of ",
                    class_name(*at->second),
                    ", which is wrapped separately; exclude one of the two, so that modules which share a parameter ",
                    "are in one group");
    }
    sharded.push_back(module);
  }
  return plans;
}

void cast_buffers(const NamedTensors& buffers, c10::ScalarType dtype) {
  for (const auto& [name, value] : buffers)
    if (at::isFloatingType(value.scalar_type())) value.set_data(value.detach().to(dtype));
}

// Materializes deferred values, moves them to device_id, broadcasts them from rank 0, and casts buffers, as requested.
void prepare_values(const WrapPlan& plan, const FSDPGroups& groups, const FSDPOptions& options) {
  const at::NoGradGuard no_grad;
  Tensors all;
  for (const auto& [name, value] : plan.parameters) all.push_back(value);
  for (const auto& [name, value] : plan.buffers) all.push_back(value);
  if (std::any_of(all.begin(), all.end(), [](const at::Tensor& t) { return is_deferred(t); }))
    materialize(*plan.module, options.device_id);
  if (options.device_id)
    for (const auto& t : all)
      if (!is_dtensor(t) && t.device() != *options.device_id) t.set_data(t.detach().to(*options.device_id));
  if (options.sync_module_states) {
    broadcast_from_first(all, groups.shard_group);
    if (groups.replicate_group) broadcast_from_first(all, groups.replicate_group);
  }
  if (options.mixed_precision.buffer_dtype) cast_buffers(plan.buffers, *options.mixed_precision.buffer_dtype);
}

std::shared_ptr<ParamGroup> make_flat_group(const WrapPlan& plan, const FSDPGroups& groups,
                                            const FSDPOptions& options) {
  std::vector<FSDPParam> params;
  std::vector<ParamShape> shapes;
  int64_t itemsize = 1;
  for (const auto& [name, value] : plan.parameters) {
    params.push_back({name, value, is_dtensor(value) ? tessera::detail::meta_of(value).spec : SpecRef()});
    shapes.push_back({local_or_self(value).sizes().vec()});
    itemsize = static_cast<int64_t>(local_or_self(value).itemsize());
  }
  auto layout = ShardLayout::flat(std::move(shapes), groups.shard_group->size(),
                                  options.use_orig_params ? std::max<int64_t>(1, kAlignBytes / itemsize) : 1);
  const auto& precision = options.mixed_precision;
  return std::make_shared<ParamGroup>(class_name(*plan.module), std::move(params), std::move(layout),
                                      groups.shard_group, groups.replicate_group,
                                      ParamGroupOptions{.param_dtype = precision.param_dtype,
                                                        .reduce_dtype = precision.reduce_dtype,
                                                        .flat_parameter = !options.use_orig_params,
                                                        .keep_low_precision_grads = precision.keep_low_precision_grads,
                                                        .offload = options.offload_params});
}

void register_input_cast(Module& module, const std::shared_ptr<ShardedModule>& sharded,
                         const MixedPrecision& precision) {
  if (!precision.param_dtype || !(precision.cast_forward_inputs || precision.cast_root_forward_inputs)) return;
  register_forward_pre_hook(module, [sharded, precision](Module&, const Tensors& inputs) -> Replacement {
    const auto& schedule = sharded->schedule;  // null before the first forward: the first module that runs is the root
    const bool is_root = !schedule || &schedule->root() == sharded->scheduled.get();
    if (!(is_root ? precision.cast_root_forward_inputs : precision.cast_forward_inputs)) return std::nullopt;
    if (sharded->summoned) return std::nullopt;  // forward runs in full precision
    auto cast = inputs;
    for (auto& input : cast)
      if (input.defined() && at::isFloatingType(input.scalar_type())) input = input.to(*precision.param_dtype);
    return cast;
  });
}

void wrap_module(const WrapPlan& plan, const FSDPGroups& groups, const FSDPOptions& options) {
  prepare_values(plan, groups, options);
  auto scheduled = std::make_shared<ScheduledGroup>();
  scheduled->group = make_flat_group(plan, groups, options);
  if (stays_unsharded_after_forward(options.sharding_strategy)) scheduled->reshard_after_forward = false;
  scheduled->prefetch_forward = options.forward_prefetch;
  scheduled->prefetch_backward = options.backward_prefetch;
  scheduled->prefetch_depth = options.limit_all_gathers ? 1 : 2;
  const auto sharded = attach(*plan.module, scheduled);
  sharded->mesh = groups.mesh;
  sharded->shard_axis = groups.shard_axis;
  register_input_cast(*plan.module, sharded, options.mixed_precision);
  if (options.use_orig_params || plan.parameters.empty()) return;
  Tensors unflattened;
  for (const auto& [name, value] : plan.parameters) unflattened.push_back(value);
  sharded->registration.emplace(*plan.module, unflattened, kFlatName, sharded->group().flat_param());
  sharded->ownership = {};  // the destructor of the old entry must run before the new entry exists
  sharded->ownership = own_parameters(sharded->group().name(), unflattened, sharded->registration->inner_modules());
}

}  // namespace
}  // namespace tessera::data_parallel::fsdp

namespace tessera {

std::ostream& operator<<(std::ostream& out, ShardingStrategy strategy) {
  static constexpr const char* kNames[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                                           "_HYBRID_SHARD_ZERO2"};
  return out << kNames[static_cast<size_t>(strategy)];
}

void detail::shard_flat(torch::nn::Module& module, const FSDPOptions& options) {
  namespace fsdp = data_parallel::fsdp;
  const fsdp::IgnoredModules ignored{options.ignored_modules, options.ignored_parameters};
  ignored.check(fsdp::kFSDP, module);
  const auto plans = fsdp::plan_wrapping(module, options, ignored);
  const auto device_type = options.device_id ? c10::DeviceTypeName(options.device_id->type(), /*lower_case=*/true)
                                             : data_parallel::device_type_of(data_parallel::parameters_of(module));
  const auto groups = fsdp::groups_from(options, device_type);
  for (const auto& plan : plans) fsdp::wrap_module(plan, groups, options);
}

Tensors detail::flat_params_of(const torch::nn::Module& module) {
  Tensors found;
  for (const auto& sharded : data_parallel::fsdp::find_sharded_modules(module)) {
    auto& group = sharded->group();
    if (group.params().empty()) continue;
    group.gradients().drop_unused_flat_param_grad();
    found.push_back(group.flat_param());
  }
  return found;
}

void detail::register_fsdp_comm_hook(torch::nn::Module& module,
                                     std::function<void(at::Tensor&, at::Tensor&)> reduce_scatter,
                                     std::function<void(at::Tensor&)> all_reduce) {
  const auto all = data_parallel::fsdp::find_sharded_modules(module);
  for (const auto& sharded : all) {
    auto& group = sharded->group();
    const bool has_replicas = group.replicate_group() != nullptr,
               shards = !has_replicas || group.shard_group()->size() > 1;
    TESSERA_CHECK(!has_replicas || !shards, UsageError, "register_comm_hook: parameter group ", group.name(),
                  " is sharded and replicated, and a comm hook replaces one collective; hybrid strategies take none");
    TESSERA_CHECK(!group.gradients().hooks().reduce_scatter && !group.gradients().hooks().all_reduce, UsageError,
                  "register_comm_hook: a comm hook is registered already; register only one");
    TESSERA_CHECK(shards == static_cast<bool>(reduce_scatter), UsageError, "register_comm_hook: parameter group ",
                  group.name(),
                  shards ? " is sharded and needs a hook(state, grad, output)"
                         : " is not sharded (NO_SHARD) and needs a hook(state, grad)");
  }
  for (const auto& sharded : all) {
    sharded->group().gradients().hooks().reduce_scatter = reduce_scatter;
    sharded->group().gradients().hooks().all_reduce = all_reduce;
  }
}

FSDPNoSync::FSDPNoSync(const torch::nn::Module& module) {
  for (const auto& sharded : data_parallel::fsdp::find_sharded_modules(module)) {
    data_parallel::fsdp::snapshot_in_traced_step(sharded->scheduled);
    before_.emplace_back(sharded->scheduled, std::exchange(sharded->scheduled->sync, false));
  }
}

FSDPNoSync::~FSDPNoSync() {
  for (auto& [scheduled, sync] : before_) scheduled->sync = sync;
}

}  // namespace tessera
