#include "tessera/compile/api/data_parallel.h"

#include "tessera/base/error.h"
#include "tessera/comm/world.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr const char* kDataParallelStyles[] = {"replicate", "fully_shard", "default"};

}  // namespace

DataParallel::DataParallel(std::string style, DataParallelOptions options)
    : style_(std::move(style)), options_(std::move(options)) {
  TESSERA_CHECK(std::find(std::begin(kDataParallelStyles), std::end(kDataParallelStyles), style_) !=
                    std::end(kDataParallelStyles),
                UsageError, "DataParallel: style is \"", style_,
                "\"; write \"replicate\", \"fully_shard\" or \"default\"");
  TESSERA_CHECK(options_.input_batch_dim >= 0, UsageError, "DataParallel: input_batch_dim is ",
                options_.input_batch_dim, "; write the index of the dim, 0 or more");
  TESSERA_CHECK(!options_.mesh || options_.mesh.ndim() == 1, UsageError, "DataParallel: mesh ", options_.mesh,
                " has several axes; pass the one over which the batch is sharded, for example mesh[\"dp\"]");
}

DeviceMesh DataParallel::mesh() const {
  return options_.mesh ? options_.mesh : init_device_mesh("cpu", {World::current().size()}, {"dp"});
}

Placement DataParallel::placement(const at::Tensor& parameter) const {
  if (style_ == "replicate" || parameter.dim() == 0) return Replicate();
  if (style_ == "fully_shard") return Shard(0);
  const bool even = parameter.size(0) % mesh().size() == 0;
  return even && parameter.numel() >= options_.shard_at_least ? Shard(0) : Replicate();
}

}  // namespace tessera
