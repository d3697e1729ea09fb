#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/detail/broadcast.h"
#include "tessera/data_parallel/fsdp/detail/api/parameter_ownership.h"
#include "tessera/data_parallel/fsdp/detail/api/clip_grad.h"
#include "tessera/data_parallel/fsdp/detail/engine/compiled_step.h"
#include "tessera/data_parallel/fsdp/detail/api/ignored_modules.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/nn/hooks.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <ostream>
#include <unordered_map>

namespace tessera {
namespace {

using namespace data_parallel;
using namespace data_parallel::fsdp;

constexpr const char* kWhat = "FullyShardedDataParallel";
constexpr const char* kFlatName = "flat_param";
constexpr int64_t kAlignBytes = 16;
constexpr const char* kStrategies[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                                       "_HYBRID_SHARD_ZERO2"};

bool is_hybrid(ShardingStrategy s) {
  return s == ShardingStrategy::HybridShard || s == ShardingStrategy::HybridShardZero2;
}
bool keeps_whole(ShardingStrategy s) {
  return s == ShardingStrategy::ShardGradOp || s == ShardingStrategy::HybridShardZero2 ||
         s == ShardingStrategy::NoShard;
}

struct Ranks {
  comm::Group shards, replicas;
  DeviceMesh mesh;
  std::optional<int64_t> shard_axis;
};

Ranks ranks_from(const FSDPOptions& options, const std::string& device_type) {
  auto mesh = options.device_mesh;
  const auto strategy = options.sharding_strategy;
  TESSERA_CHECK(!mesh || !options.process_group, UsageError, kWhat,
                ": both device_mesh and process_group are given; give one");
  if (is_hybrid(strategy)) {
    TESSERA_CHECK(mesh && mesh.ndim() == 2, UsageError, kWhat, ": ", strategy,
                  " needs a device_mesh of two axes, to copy over and to cut over");
    return {mesh.get_group(1), mesh.get_group(0), mesh, 1};
  }
  TESSERA_CHECK(!mesh || mesh.ndim() == 1, UsageError, kWhat, ": device_mesh ", mesh, " has ", mesh ? mesh.ndim() : 0,
                " axes; give the one to cut over, or a hybrid strategy");
  if (!mesh)
    mesh = DeviceMesh::from_group(options.process_group ? options.process_group : World::current().group(), device_type,
                                  "dp");
  if (strategy != ShardingStrategy::NoShard) return {mesh.get_group(), {}, mesh, 0};
  const auto world = World::current();
  return {world.shared_group({world.rank()}), mesh.get_group(), mesh, {}};
}

// A module that is going to be a unit, and what of it is.
struct Plan {
  Module* module;
  NamedTensors parameters, buffers;
};

void check(const Plan& plan, const FSDPOptions& options) {
  const auto& [module, parameters, buffers] = plan;
  TESSERA_CHECK(!is_list(*module), UsageError, kWhat, ": ", class_name(*module),
                " is a list of modules, which never runs by itself; wrap what is in it, or what it is in");
  check_can_attach(kWhat, *module);
  check_unclaimed(kWhat, *module, parameters);
  for (const auto& [name, value] : parameters) {
    const auto& local = local_value(value);
    const auto& first = local_value(parameters[0].value);
    TESSERA_CHECK(!local.is_meta() || is_deferred(value), UsageError, kWhat, ": parameter ", name,
                  " is on the meta device without values; build the module with deferred_init(), or fill it first");
    TESSERA_CHECK(local.dim() > 0, UsageError, kWhat, ": parameter ", name,
                  " is a single number, which cannot be cut; give it a dim of size 1");
    TESSERA_CHECK(at::isFloatingType(local.scalar_type()), UsageError, kWhat, ": parameter ", name, " is ",
                  local.scalar_type(), ", for which there are no gradients; make it a buffer, or ignore it");
    TESSERA_CHECK(local.scalar_type() == first.scalar_type(), UsageError, kWhat, ": parameter ", name, " is ",
                  local.scalar_type(), " and ", parameters[0].name, " is ", first.scalar_type(),
                  "; one flat parameter has one dtype: wrap one of the two by itself");
    TESSERA_CHECK(local.device() == first.device() || options.device_id, UsageError, kWhat, ": parameter ", name,
                  " is on ", local.device(), " and ", parameters[0].name, " on ", first.device(),
                  "; move the module to one device, or give device_id");
    TESSERA_CHECK(options.use_orig_params || value.requires_grad() == parameters[0].value.requires_grad(), UsageError,
                  kWhat, ": parameter ", name, value.requires_grad() ? " requires" : " does not require",
                  " a gradient, unlike ", parameters[0].name, "; set use_orig_params");
    if (!is_dtensor(value)) continue;
    const auto& spec = DTensor(value).spec();
    TESSERA_CHECK(!spec.has_partial(), UsageError, kWhat, ": parameter ", name, " is ", DTensor(value),
                  ", a sum that is not yet taken; redistribute it first");
    TESSERA_CHECK(!options.device_mesh || spec.mesh != options.device_mesh, UsageError, kWhat, ": parameter ", name,
                  " is ", DTensor(value), ", over the very ranks it is to be cut over; give another axis");
  }
}

// The module and those inside that the policy chooses, inner ones first. Changes nothing.
std::vector<Plan> make_plans(Module& root, const FSDPOptions& options, const Ignored& ignored) {
  std::vector<Module*> modules;
  if (options.auto_wrap_policy) modules = modules_to_wrap(root, options.auto_wrap_policy, ignored);
  modules.push_back(&root);
  auto taken = fsdp_modules(root);
  std::vector<Plan> plans;
  std::unordered_map<const void*, const Module*> owners;
  for (auto* module : modules) {
    plans.push_back({module, ignored.parameters_left(*module, taken), ignored.buffers_left(*module, taken)});
    check(plans.back(), options);
    for (const auto& [name, value] : plans.back().parameters) {
      const auto [at, is_new] = owners.emplace(value.unsafeGetTensorImpl(), module);
      TESSERA_CHECK(is_new, UsageError, kWhat, ": parameter ", name, " of ", class_name(*module), " is also one of ",
                    class_name(*at->second),
                    ", which is wrapped by itself; leave out one of the two, so that modules which share a parameter ",
                    "are in one unit");
    }
    taken.push_back(module);
  }
  return plans;
}

void turn_buffers_into(const NamedTensors& buffers, c10::ScalarType dtype) {
  for (const auto& [name, value] : buffers)
    if (at::isFloatingType(value.scalar_type())) value.set_data(value.detach().to(dtype));
}

// Values at hand, on the device asked for, the first rank's.
void prepare(const Plan& plan, const Ranks& ranks, const FSDPOptions& options) {
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
    broadcast_from_first(all, ranks.shards);
    if (ranks.replicas) broadcast_from_first(all, ranks.replicas);
  }
  if (options.mixed_precision.buffer_dtype) turn_buffers_into(plan.buffers, *options.mixed_precision.buffer_dtype);
}

std::shared_ptr<Unit> make_unit(const Plan& plan, const Ranks& ranks, const FSDPOptions& options) {
  std::vector<Member> members;
  std::vector<Extent> extents;
  int64_t item = 1;
  for (const auto& [name, value] : plan.parameters) {
    members.push_back({name, value, is_dtensor(value) ? detail::meta_of(value).spec : SpecRef()});
    extents.push_back({local_value(value).sizes().vec()});
    item = static_cast<int64_t>(local_value(value).itemsize());
  }
  auto layout = ShardLayout::flat(std::move(extents), ranks.shards->size(),
                                  options.use_orig_params ? std::max<int64_t>(1, kAlignBytes / item) : 1);
  const auto& precision = options.mixed_precision;
  UnitOptions unit_options{.param_dtype = precision.param_dtype,
                           .reduce_dtype = precision.reduce_dtype,
                           .flat_parameter = !options.use_orig_params,
                           .keep_low_precision_grads = precision.keep_low_precision_grads,
                           .offload = options.offload_params};
  return std::make_shared<Unit>(class_name(*plan.module), std::move(members), std::move(layout), ranks.shards,
                                ranks.replicas, unit_options);
}

void cast_inputs(Module& module, const std::shared_ptr<ShardedModule>& sharded, const MixedPrecision& precision) {
  if (!precision.param_dtype || !(precision.cast_forward_inputs || precision.cast_root_forward_inputs)) return;
  register_forward_pre_hook(module, [sharded, precision](Module&, const Tensors& inputs) -> Replacement {
    const auto& schedule = sharded->schedule;  // none yet: the first to run is the root
    const bool is_root = !schedule || &schedule->root() == sharded->turn.get();
    if (!(is_root ? precision.cast_root_forward_inputs : precision.cast_forward_inputs)) return std::nullopt;
    if (sharded->summoned) return std::nullopt;  // computes in full precision
    auto cast = inputs;
    for (auto& input : cast)
      if (input.defined() && at::isFloatingType(input.scalar_type())) input = input.to(*precision.param_dtype);
    return cast;
  });
}

void wrap(const Plan& plan, const Ranks& ranks, const FSDPOptions& options) {
  prepare(plan, ranks, options);
  auto turn = std::make_shared<Turn>();
  turn->unit = make_unit(plan, ranks, options);
  if (keeps_whole(options.sharding_strategy)) turn->reshard_after_forward = false;
  turn->prefetch_forward = options.forward_prefetch;
  turn->prefetch_backward = options.backward_prefetch;
  turn->ahead = options.limit_all_gathers ? 1 : 2;
  const auto sharded = attach(*plan.module, turn);
  sharded->mesh = ranks.mesh;
  sharded->shard_axis = ranks.shard_axis;
  cast_inputs(*plan.module, sharded, options.mixed_precision);
  if (options.use_orig_params || plan.parameters.empty()) return;
  Tensors handles;
  for (const auto& [name, value] : plan.parameters) handles.push_back(value);
  sharded->registration.emplace(*plan.module, handles, kFlatName, turn->unit->flat());
  sharded->claim = {};  // before the same is said again, and more
  sharded->claim = claim(turn->unit->name(), handles, sharded->registration->taken_from());
}

}  // namespace

std::ostream& operator<<(std::ostream& out, ShardingStrategy strategy) {
  return out << kStrategies[static_cast<size_t>(strategy)];
}

FSDPState::FSDPState(torch::nn::Module& module, const FSDPOptions& options) : module_(&module) {
  const Ignored ignored{options.ignored_modules, options.ignored_parameters};
  ignored.check(kWhat, module);
  const auto plans = make_plans(module, options, ignored);
  const auto parameters = module.parameters();
  const auto device = options.device_id           ? *options.device_id
                      : parameters.empty()        ? c10::Device(c10::kCPU)
                      : is_dtensor(parameters[0]) ? local_value(parameters[0]).device()
                                                  : parameters[0].device();
  const auto ranks = ranks_from(options, device.is_meta() ? "cpu" : c10::DeviceTypeName(device.type(), true));
  for (const auto& plan : plans) wrap(plan, ranks, options);
}

Tensors FSDPState::flat_params() const {
  Tensors found;
  for (const auto& sharded : find_all(*module_)) {
    const auto& unit = *sharded->turn->unit;
    if (unit.members().empty()) continue;
    // Gradients that were taken away from the originals (zero_grad) are gone from here, too.
    if (!unit.options().flat_parameter &&
        std::none_of(unit.members().begin(), unit.members().end(),
                     [](const Member& member) { return member.handle.grad().defined(); }) &&
        unit.flat().grad().defined())
      unit.flat().mutable_grad().reset();
    found.push_back(unit.flat());
  }
  return found;
}

at::Tensor FSDPState::clip_grad_norm_(double max_norm, double norm_type) const {
  return data_parallel::fsdp::clip_grad_norm_(*module_, max_norm, norm_type);
}

FSDPState::NoSync::NoSync(const FSDPState& state) {
  for (const auto& sharded : find_all(*state.module_)) {
    note_in_compiled_step(sharded->turn);
    before_.emplace_back(sharded->turn, std::exchange(sharded->turn->sync, false));
  }
}
FSDPState::NoSync::~NoSync() {
  for (auto& [turn, sync] : before_) turn->sync = sync;
}

}  // namespace tessera
