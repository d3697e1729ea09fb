#include "tessera/comm/collectives.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;

comm::Work waited(comm::Work work, bool async_op) {
  if (!async_op) work.wait();
  return work;
}

}  // namespace

comm::Group group_from(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) {
  return comm::Communicator::from(process_group);
}

comm::Work all_reduce(at::Tensor& x, ReduceOp op, const GroupRef& group, bool async_op) {
  return waited(group->all_reduce(x, op), async_op);
}
comm::Work all_reduce_coalesced(Tensors xs, ReduceOp op, const GroupRef& group, bool async_op) {
  return waited(group->all_reduce_coalesced(std::move(xs), op), async_op);
}
comm::Work all_gather(Tensors outs, const at::Tensor& in, const GroupRef& group, bool async_op) {
  return waited(group->all_gather(std::move(outs), in), async_op);
}
comm::Work all_gather_into_tensor(at::Tensor& out, const at::Tensor& in, const GroupRef& group, bool async_op) {
  return waited(group->all_gather_into_tensor(out, in), async_op);
}
comm::Work reduce_scatter(at::Tensor& out, Tensors ins, ReduceOp op, const GroupRef& group, bool async_op) {
  return waited(group->reduce_scatter(out, std::move(ins), op), async_op);
}
comm::Work reduce_scatter_tensor(at::Tensor& out, const at::Tensor& in, ReduceOp op, const GroupRef& group,
                                 bool async_op) {
  return waited(group->reduce_scatter_tensor(out, in, op), async_op);
}
comm::Work broadcast(at::Tensor& x, int64_t source, const GroupRef& group, bool async_op) {
  return waited(group->broadcast(x, source), async_op);
}
comm::Work scatter(at::Tensor& out, Tensors ins, int64_t source, const GroupRef& group, bool async_op) {
  return waited(group->scatter(out, std::move(ins), source), async_op);
}
comm::Work gather(Tensors outs, const at::Tensor& in, int64_t target, const GroupRef& group, bool async_op) {
  return waited(group->gather(std::move(outs), in, target), async_op);
}
comm::Work reduce(at::Tensor& x, int64_t target, ReduceOp op, const GroupRef& group, bool async_op) {
  return waited(group->reduce(x, target, op), async_op);
}
comm::Work all_to_all_single(at::Tensor& out, const at::Tensor& in, at::IntArrayRef out_splits,
                             at::IntArrayRef in_splits, const GroupRef& group, bool async_op) {
  return waited(group->all_to_all_single(out, in, out_splits, in_splits), async_op);
}
comm::Work all_to_all(Tensors outs, Tensors ins, const GroupRef& group, bool async_op) {
  return waited(group->all_to_all(std::move(outs), std::move(ins)), async_op);
}
void send(const at::Tensor& x, int64_t to, const GroupRef& group, int tag) { isend(x, to, group, tag).wait(); }
void recv(at::Tensor& x, int64_t from, const GroupRef& group, int tag) { irecv(x, from, group, tag).wait(); }
comm::Work isend(const at::Tensor& x, int64_t to, const GroupRef& group, int tag) { return group->send(x, to, tag); }
comm::Work irecv(at::Tensor& x, int64_t from, const GroupRef& group, int tag) { return group->recv(x, from, tag); }
comm::Work barrier(const GroupRef& group, bool async_op) { return waited(group->barrier(), async_op); }

}  // namespace tessera
