#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/broadcast.h"
#include "tessera/data_parallel/fsdp/sharded_module.h"
#include "tessera/data_parallel/local_gradient.h"
#include "tessera/data_parallel/named_tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/module_tree.h"

#include <ostream>

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

struct Groups {
  comm::Group shards, replicas;
};

Groups groups_from(const FSDPOptions& options) {
  const auto& mesh = options.device_mesh;
  const auto strategy = options.sharding_strategy;
  TESSERA_CHECK(!mesh || !options.process_group, UsageError, kWhat,
                ": both device_mesh and process_group are given; give one");
  if (is_hybrid(strategy)) {
    TESSERA_CHECK(mesh && mesh.ndim() == 2, UsageError, kWhat, ": ", strategy,
                  " needs a device_mesh of two axes, to copy over and to cut over");
    return {mesh.get_group(1), mesh.get_group(0)};
  }
  TESSERA_CHECK(!mesh || mesh.ndim() == 1, UsageError, kWhat, ": device_mesh ", mesh, " has ", mesh.ndim(),
                " axes; give the one to cut over");
  auto group = mesh ? mesh.get_group() : options.process_group ? options.process_group : World::current().group();
  if (strategy != ShardingStrategy::NoShard) return {group, {}};
  const auto world = World::current();
  return {world.shared_group({world.rank()}), group};
}

}  // namespace

std::ostream& operator<<(std::ostream& out, ShardingStrategy strategy) {
  return out << kStrategies[static_cast<size_t>(strategy)];
}

FSDPState::FSDPState(torch::nn::Module& module, const FSDPOptions& options) : module_(&module) {
  check_can_attach(kWhat, module);
  const auto groups = groups_from(options);
  const auto taken = fsdp_modules(module);
  const auto parameters = parameters_of(module, taken);
  std::vector<Member> members;
  std::vector<Extent> extents;
  Tensors handles;
  for (const auto& [name, value] : parameters) {
    const auto& local = local_value(value);
    const auto& first = local_value(parameters[0].value);
    TESSERA_CHECK(!options.offload_params || local.is_cpu(), UsageError, kWhat, ": offload_params, but parameter ",
                  name, " is on ", local.device(), "; offloading from a device is not there yet");
    TESSERA_CHECK(local.dim() > 0, UsageError, kWhat, ": parameter ", name,
                  " is a single number, which cannot be cut; give it a dim of size 1");
    TESSERA_CHECK(local.scalar_type() == first.scalar_type(), UsageError, kWhat, ": parameter ", name, " is ",
                  local.scalar_type(), " and ", parameters[0].name, " is ", first.scalar_type(),
                  "; one flat parameter has one dtype");
    TESSERA_CHECK(options.use_orig_params || value.requires_grad() == parameters[0].value.requires_grad(), UsageError,
                  kWhat, ": parameter ", name, value.requires_grad() ? " requires" : " does not require",
                  " a gradient, unlike ", parameters[0].name, "; set use_orig_params");
    members.push_back({name, value, is_dtensor(value) ? detail::meta_of(value).spec : SpecRef()});
    extents.push_back({local.sizes().vec()});
    handles.push_back(value);
  }
  if (options.sync_module_states) {
    auto all = handles;
    for (const auto& buffer : buffers_of(module, taken)) all.push_back(buffer.value);
    broadcast_from_first(all, groups.shards);
    if (groups.replicas) broadcast_from_first(all, groups.replicas);
  }
  const int64_t item = parameters.empty() ? 1 : static_cast<int64_t>(local_value(parameters[0].value).itemsize());
  auto layout = ShardLayout::flat(std::move(extents), groups.shards->size(),
                                  options.use_orig_params ? std::max<int64_t>(1, kAlignBytes / item) : 1);
  auto turn = std::make_shared<Turn>();
  turn->unit = std::make_shared<Unit>(class_name(module), std::move(members), std::move(layout), groups.shards,
                                      groups.replicas, UnitOptions{.flat_parameter = !options.use_orig_params});
  if (keeps_whole(options.sharding_strategy)) turn->reshard_after_forward = false;
  own_ = attach(module, turn);
  if (!options.use_orig_params && !handles.empty())
    own_->registration.emplace(module, handles, kFlatName, turn->unit->flat());
}

Tensors FSDPState::flat_params() const {
  Tensors found;
  for (const auto& sharded : find_all(*module_))
    if (!sharded->turn->unit->members().empty()) found.push_back(sharded->turn->unit->flat());
  return found;
}

void FSDPState::set_requires_gradient_sync(bool sync) {
  for (const auto& sharded : find_all(*module_)) sharded->turn->sync = sync;
}

SummonFullParams::SummonFullParams(torch::nn::Module& module, SummonOptions options) : options_(options) {
  for (auto& sharded : find_all(module)) {
    if (!options.recurse && sharded->module != &module) continue;
    sharded->turn->unit->open();
    if (sharded->registration) sharded->registration->show_originals();
    opened_.push_back(std::move(sharded));
  }
}

SummonFullParams::~SummonFullParams() {
  for (auto& sharded : opened_) {
    sharded->turn->unit->settle_writes(options_.writeback);
    sharded->turn->unit->close();
    if (sharded->registration) sharded->registration->show_flat();
  }
}

}  // namespace tessera
