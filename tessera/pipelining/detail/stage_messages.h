#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/pipelining/detail/action.h"

#include <compare>
#include <deque>
#include <map>
#include <utility>

// Tensors that travel between the stages of a pipeline.
namespace tessera::pipelining {

// The output of the stage before, or the gradient from the stage behind, for a microbatch of `stage`.
struct MessageKey {
  int64_t stage = 0;
  int64_t microbatch = 0;
  bool forward = true;
  auto operator<=>(const MessageKey&) const = default;
};

// Bytes of the header of a message.
int64_t message_header_bytes();

// Messages of one step. Sends return at once; their tensors live until the end of the step. Two ranks exchange messages
// in one order, that of the schedule: before a message come all that were announced before it.
//
// A tensor travels behind a header with its dtype, its sizes, and for a DTensor its global sizes and placements. So
// microbatches may differ in size. A gradient may be undefined.
class StageMessages {
 public:
  explicit StageMessages(comm::Group group) : group_(std::move(group)) {}

  // `action` is what the rank does now. The status of a rank that is lost shows it to its peers.
  void send(const at::Tensor& x, int64_t to, const at::Device& device, const Action& action);
  // A RECV of the schedule.
  void announce(const MessageKey& key, int64_t from) { announced_[from].push_back(key); }
  // Waits for an announced message. `mesh`: of DTensors.
  at::Tensor take(const MessageKey& key, int64_t from, const at::Device& device, const DeviceMesh& mesh,
                  const Action& action);
  // Waits until all sends are complete.
  void finish();

 private:
  void post(at::Tensor x, int64_t to, const char* action);
  at::Tensor recv(int64_t from, const at::Device& device, const DeviceMesh& mesh, const char* action);

  comm::Group group_;
  std::deque<std::pair<at::Tensor, comm::Work>> sent_;
  std::map<int64_t, std::deque<MessageKey>> announced_;  // by peer
  std::map<MessageKey, at::Tensor> arrived_;
};

}  // namespace tessera::pipelining
