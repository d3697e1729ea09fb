#pragma once
#include "tessera/comm/world.h"

// The collectives of torch.distributed: ts::all_reduce(x) is Python's dist.all_reduce(x). They write into the tensors
// that they are given. Without async_op they return when the result can be read. With async_op the caller calls wait()
// on the returned Work before it reads the result.
//
// `group` is a ts::comm::Group, a c10d::ProcessGroup, a 1-D mesh, {mesh, axis}, or {} for all ranks.
// The rank arguments (source, target, to, from) count within the group.
//
// Example:
//   all_reduce(grad, ReduceOp::Sum, {mesh, "dp"});
//   auto work = all_reduce(x, ReduceOp::Max, {}, /*async_op=*/true);
//   work.wait();
namespace tessera {

// The group of a c10d::ProcessGroup, to use a process group of other code here. No communication.
// While the Group exists, the same process group gives the same Group, and Group::process_group() returns it.
// CPU tensors use its CPU backend, other tensors its CUDA backend. Its store, if it has one, becomes the group's store.
// ranks() are the global ranks from the backend's options if it has them, else 0..size-1.
// A null pointer gives a null Group.
comm::Group group_from(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);

// A parameter or option that is a group. It converts from everything that has a group. No constructor communicates.
// Example:  ts::DDPOptions{.process_group = my_c10d_process_group}
class GroupRef {
 public:
  GroupRef() = default;                                      // not given: the group of the current world, at use
  GroupRef(comm::Group group) : group_(std::move(group)) {}  // a null group: not given
  // A process group of c10d. See group_from.
  GroupRef(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) : group_(group_from(process_group)) {}
  // A 1-D mesh.
  template <class Mesh>
  requires requires(const Mesh& mesh) { mesh.get_group(); }
  GroupRef(const Mesh& mesh) : group_(mesh.get_group()) {}
  // One axis of a mesh.
  template <class Mesh, class Axis>
  requires requires(const Mesh& mesh, const Axis& axis) { mesh.get_group(axis); }
  GroupRef(const Mesh& mesh, const Axis& axis) : group_(mesh.get_group(axis)) {}

  explicit operator bool() const { return group_ != nullptr; }  // whether a group was given
  // The group that was given, else the group of the current world. Throws UsageError if there is neither.
  comm::Group group() const { return group_ ? group_ : World::current().group(); }
  comm::Communicator* operator->() const { return group_ ? group_.get() : World::current().group().get(); }

 private:
  comm::Group group_;
};

// In place. The arguments are those of torch.distributed: all_reduce, all_reduce_coalesced, all_gather,
// all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor, broadcast, scatter, gather, reduce, all_to_all_single,
// all_to_all, send, recv, isend, irecv, barrier. They throw CommError if a peer fails, UsageError for bad arguments.
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

// Decisions that all ranks take together: a rank that leaves a loop alone makes the others wait for it. Every rank of
// the group calls these functions, and every rank gets the same result.
// Example:  if (any_rank(std::isnan(loss.item<double>()))) break;
//           scheduler.step(mean_over_ranks(validation_loss));      // ReduceLROnPlateau
bool any_rank(bool mine, const GroupRef& group = {});             // true on at least one rank
bool all_ranks(bool mine, const GroupRef& group = {});            // true on every rank
double mean_over_ranks(double mine, const GroupRef& group = {});  // the mean of the numbers of all ranks
// The elementwise mean, as a new tensor without gradient history. Requires: a floating-point tensor, of the same sizes
// on all ranks.
at::Tensor mean_over_ranks(const at::Tensor& mine, const GroupRef& group = {});

}  // namespace tessera
