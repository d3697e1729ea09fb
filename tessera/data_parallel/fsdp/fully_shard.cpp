#include "tessera/data_parallel/fsdp/fully_shard.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/sharded_module.h"
#include "tessera/data_parallel/local_gradient.h"
#include "tessera/data_parallel/named_tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/module_tree.h"

namespace tessera {
namespace {

using namespace data_parallel;
using namespace data_parallel::fsdp;

}  // namespace

void fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  check_can_attach("fully_shard", module);
  const auto mesh = options.mesh ? options.mesh : init_device_mesh("cpu", {World::current().size()}, {"dp"});
  TESSERA_CHECK(mesh.ndim() <= 2, UsageError, "fully_shard: mesh ", mesh, " has ", mesh.ndim(),
                " axes; give one to cut over, or two to copy and cut over");
  const int64_t axis = mesh.ndim() - 1;
  const auto shards = mesh.get_group(axis);
  const auto replicas = mesh.ndim() == 2 ? mesh.get_group(0) : comm::Group();
  std::vector<Member> members;
  std::vector<Extent> extents;
  for (const auto& [name, value] : parameters_of(module, fsdp_modules(module))) {
    TESSERA_CHECK(!is_dtensor(value), UsageError, "fully_shard: parameter ", name, " is ", DTensor(value),
                  "; parameters over other axes are not taken yet");
    TESSERA_CHECK(value.dim() > 0, UsageError, "fully_shard: parameter ", name, " has no dim to cut along");
    const auto dim = options.shard_placement_fn ? options.shard_placement_fn(value).value_or(0) : 0;
    TESSERA_CHECK(dim >= 0 && dim < value.dim(), UsageError, "fully_shard: parameter ", name, " of shape ",
                  value.sizes(), " has no dim ", dim);
    Placements placements(static_cast<size_t>(mesh.ndim()), Replicate());
    placements[static_cast<size_t>(axis)] = Shard(dim);
    extents.push_back({value.sizes().vec(), dim});
    members.push_back({name,
                       value,
                       {},
                       intern(mesh, placements, value.sizes(), tessera::contiguous_strides(value.sizes()),
                              value.scalar_type(), value.device())});
  }
  auto layout = ShardLayout::per_parameter(std::move(extents), shards->size());
  auto turn = std::make_shared<Turn>();
  turn->unit = std::make_shared<Unit>(class_name(module), std::move(members), std::move(layout), shards, replicas,
                                      UnitOptions{options.mp_policy.param_dtype, options.mp_policy.reduce_dtype});
  turn->reshard_after_forward = options.reshard_after_forward;
  attach(module, std::move(turn));
}

}  // namespace tessera
