#include "tessera/data_parallel/detail/broadcast.h"

#include "tessera/comm/detail/flat_tensors.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/buckets.h"
#include "tessera/data_parallel/detail/local_gradient.h"

#include <ATen/core/grad_mode.h>

namespace tessera::data_parallel {
namespace {

constexpr int64_t kMaxBufferBytes = int64_t{250} << 20;

}  // namespace

void broadcast_from(int64_t rank_in_group, const Tensors& tensors, const comm::Group& group) {
  if (group->size() == 1) return;
  const at::NoGradGuard no_grad;
  Tensors locals;
  std::vector<BucketItem> items;
  for (const auto& t : tensors) {
    locals.push_back(local_or_self(t).detach());
    items.push_back({static_cast<int64_t>(locals.back().nbytes()), t.scalar_type(), locals.back().device()});
  }
  for (const auto& bucket : fill_buckets(items, first_to_last(items.size()), {kMaxBufferBytes, kMaxBufferBytes})) {
    Tensors members;
    for (const size_t i : bucket) members.push_back(locals[i]);
    const auto buffer = comm::detail::flatten(members);
    comm::broadcast_(buffer, rank_in_group, group);
    funcol::wait(buffer, group);
    comm::detail::unflatten_into(members, buffer);
  }
}

}  // namespace tessera::data_parallel
