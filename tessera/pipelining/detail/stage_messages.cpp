#include "tessera/pipelining/detail/stage_messages.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <set>

namespace tessera::pipelining {
namespace {

constexpr size_t kMaxDims = 12;

// All that the receiver must know before the values.
struct MessageHeader {
  int64_t dtype = 0;
  int64_t dims = 0;  // -1: an undefined tensor, without values
  std::array<int64_t, kMaxDims> sizes = {};
  std::array<int64_t, kMaxDims> global_sizes = {};  // of a DTensor
  std::array<char, 240> placements = {};            // of a DTensor, as text; empty: a plain tensor
};
constexpr int64_t kHeaderWords = sizeof(MessageHeader) / sizeof(int64_t);
static_assert(sizeof(MessageHeader) % sizeof(int64_t) == 0);

MessageHeader header_of(const at::Tensor& x, const at::Tensor& local) {
  MessageHeader header;
  if (!x.defined()) {
    header.dims = -1;
    return header;
  }
  TESSERA_CHECK(x.dim() <= static_cast<int64_t>(kMaxDims), UsageError, "an output of a pipeline stage has ", x.dim(),
                " dims. At most ", kMaxDims, " can be sent");
  header.dtype = static_cast<int64_t>(x.scalar_type());
  header.dims = x.dim();
  std::ranges::copy(local.sizes(), header.sizes.begin());
  if (!is_dtensor(x)) return header;
  std::ranges::copy(x.sizes(), header.global_sizes.begin());
  const std::string text = to_string(DTensor(x).placements());
  TESSERA_CHECK(text.size() < header.placements.size(), UsageError, "an output of a pipeline stage has placements ",
                text, ". They are too many to be sent: redistribute the output");
  std::ranges::copy(text, header.placements.begin());
  return header;
}

// The text of an action, for collectives that may outlive the step. There are few actions, so none is freed.
const char* interned(const Action& action) {
  static std::mutex mutex;
  static auto& texts = *new std::set<std::string>();
  const std::lock_guard lock(mutex);
  return texts.insert(to_string(action)).first->c_str();
}

}  // namespace

int64_t message_header_bytes() { return sizeof(MessageHeader); }

void StageMessages::send(const at::Tensor& x, int64_t to, const at::Device& device, const Action& action) {
  const at::Tensor local = x.defined() && is_dtensor(x) ? DTensor(x).to_local() : x;
  const MessageHeader header = header_of(x, local);
  at::Tensor words = at::empty({kHeaderWords}, at::kLong);
  std::memcpy(words.mutable_data_ptr(), &header, sizeof header);
  const char* name = interned(action);
  post(words.to(device), to, name);
  if (x.defined()) post(local.contiguous(), to, name);
}

at::Tensor StageMessages::recv(int64_t from, const at::Device& device, const DeviceMesh& mesh, const char* action) {
  at::Tensor words = at::empty({kHeaderWords}, at::TensorOptions(at::kLong).device(device));
  group_->recv(words, from, 0, {.tensor_name = action}).wait();
  words = words.cpu();
  MessageHeader header;
  std::memcpy(&header, words.const_data_ptr(), sizeof header);
  if (header.dims < 0) return {};
  at::Tensor x = at::empty(at::IntArrayRef(header.sizes.data(), header.dims),
                           at::TensorOptions(static_cast<at::ScalarType>(header.dtype)).device(device));
  group_->recv(x, from, 0, {.tensor_name = action}).wait();
  if (header.placements[0] == 0) return x;
  TESSERA_CHECK(mesh, UsageError, "the stage before or behind sends a DTensor with placements ",
                header.placements.data(),
                ". Set PipelineStage::mesh of this stage to the mesh of its activations, such as mesh[\"tp\"]");
  const std::vector<int64_t> sizes(header.global_sizes.begin(), header.global_sizes.begin() + header.dims);
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  return DTensor::from_local(x, mesh, parse_placements(header.placements.data()), {.shape = sizes, .stride = strides});
}

at::Tensor StageMessages::take(const MessageKey& key, int64_t from, const at::Device& device, const DeviceMesh& mesh,
                               const Action& action) {
  while (!arrived_.contains(key)) {
    std::deque<MessageKey>& queue = announced_[from];
    TESSERA_CHECK(!queue.empty(), InternalError, "a message of rank ", from, " is used before its RECV");
    arrived_[queue.front()] = recv(from, device, mesh, interned(action));
    queue.pop_front();
  }
  return arrived_.extract(key).mapped();
}

void StageMessages::finish() {
  for (auto& [x, work] : sent_) work.wait();
  sent_.clear();
}

void StageMessages::post(at::Tensor x, int64_t to, const char* action) {
  comm::Work work = group_->send(x, to, 0, {.tensor_name = action});
  sent_.emplace_back(std::move(x), std::move(work));
}

}  // namespace tessera::pipelining
