#pragma once
#include "tessera/comm/world.h"

// c10d's collectives under their own names, on a group, a mesh axis, or the current world. They write into the tensors
// they are given. With async_op the result may be read after wait() on the Work; without it the Work is done.
// Ranks (source, target, to, from) are places in the group.
// Example:  all_reduce(grad, ReduceOp::Sum, {mesh, "dp"});    auto work = all_reduce(x, ReduceOp::Max, {}, true);
namespace tessera {

// A group, however it is named. Made by conversion; nothing: the current world.
class GroupRef {
 public:
  GroupRef() : group_(World::current().group()) {}
  GroupRef(comm::Group group) : group_(group ? std::move(group) : World::current().group()) {}
  template <class Mesh>  // a 1-D mesh, or a mesh and an axis: anything with get_group
  requires requires(const Mesh& mesh) { mesh.get_group(); }
  GroupRef(const Mesh& mesh) : group_(mesh.get_group()) {}
  template <class Mesh, class Axis>
  requires requires(const Mesh& mesh, const Axis& axis) { mesh.get_group(axis); }
  GroupRef(const Mesh& mesh, const Axis& axis) : group_(mesh.get_group(axis)) {}

  comm::Communicator* operator->() const { return group_.get(); }
  const comm::Group& group() const { return group_; }

 private:
  comm::Group group_;
};

comm::Work all_reduce(at::Tensor& x, ReduceOp op = ReduceOp::Sum, const GroupRef& group = {}, bool async_op = false);
comm::Work all_reduce_coalesced(std::vector<at::Tensor> xs, ReduceOp op = ReduceOp::Sum, const GroupRef& group = {},
                                bool async_op = false);
comm::Work all_gather(std::vector<at::Tensor> outs, const at::Tensor& in, const GroupRef& group = {},
                      bool async_op = false);
comm::Work all_gather_into_tensor(at::Tensor& out, const at::Tensor& in, const GroupRef& group = {},
                                  bool async_op = false);
comm::Work reduce_scatter(at::Tensor& out, std::vector<at::Tensor> ins, ReduceOp op = ReduceOp::Sum,
                          const GroupRef& group = {}, bool async_op = false);
comm::Work reduce_scatter_tensor(at::Tensor& out, const at::Tensor& in, ReduceOp op = ReduceOp::Sum,
                                 const GroupRef& group = {}, bool async_op = false);
comm::Work broadcast(at::Tensor& x, int64_t source, const GroupRef& group = {}, bool async_op = false);
comm::Work scatter(at::Tensor& out, std::vector<at::Tensor> ins, int64_t source, const GroupRef& group = {},
                   bool async_op = false);
comm::Work gather(std::vector<at::Tensor> outs, const at::Tensor& in, int64_t target, const GroupRef& group = {},
                  bool async_op = false);
comm::Work reduce(at::Tensor& x, int64_t target, ReduceOp op = ReduceOp::Sum, const GroupRef& group = {},
                  bool async_op = false);
comm::Work all_to_all_single(at::Tensor& out, const at::Tensor& in, at::IntArrayRef out_splits = {},
                             at::IntArrayRef in_splits = {}, const GroupRef& group = {}, bool async_op = false);
comm::Work all_to_all(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins, const GroupRef& group = {},
                      bool async_op = false);
void send(const at::Tensor& x, int64_t to, const GroupRef& group = {}, int tag = 0);
void recv(at::Tensor& x, int64_t from, const GroupRef& group = {}, int tag = 0);
comm::Work isend(const at::Tensor& x, int64_t to, const GroupRef& group = {}, int tag = 0);
comm::Work irecv(at::Tensor& x, int64_t from, const GroupRef& group = {}, int tag = 0);
comm::Work barrier(const GroupRef& group = {}, bool async_op = false);

}  // namespace tessera
