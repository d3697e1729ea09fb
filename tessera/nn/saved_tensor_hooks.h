#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

// Saved-tensor hooks: who keeps what autograd saves for backward. LibTorch has them in Python only; here an autograd
// engine of ours asks, for each tensor that is saved on a thread, the packers that are on there:
//
//   torch::exp(x)   autograd saves the result  ->  packers are asked  ->  one returns how to bring it back
//   backward()      autograd needs it          ->  that is called
//
// Order. Packers that claim only some tensors (those that lie in a buffer which FSDP will free) are asked first,
// innermost first; then the innermost of those that take all (a checkpoint, save_on_cpu). So a claim holds whichever
// way scopes nest:
//
//   { claims weights { checkpoint { ... } } }        a weight: the claimer's       an activation: the checkpoint's
//   { checkpoint { claims weights { ... } } }        the same
//
// What nobody takes is saved as usual, writes in place to it being found out as usual. Of two packers that take all
// the inner one takes, and the outer never hears of it: as in PyTorch.
namespace tessera {

// Brings a saved tensor back. Called in backward, on the thread that needs it, once for each time it is needed.
using Unpack = std::function<at::Tensor()>;
// Takes over a tensor and returns how to bring it back: the same values, sizes, dtype and device. An empty function
// declines. Called without gradients. Must not keep `t` itself, which may own the graph that will own the packed
// tensor: keep a VersionedTensor, or whatever else it can be made from again.
using Pack = std::function<Unpack(const at::Tensor& t)>;

enum class Accepts : uint8_t { Some, All };
struct Packer {
  Accepts claims;  // All: never declines
  Pack pack;
};
using PackerRef = std::shared_ptr<const Packer>;

// Turns a packer on for this thread while alive. Scopes end in the reverse of the order they began in.
// Throws UsageError in a process in which Python's torch is loaded: its engine does not ask us.
// Example:  SavedTensorHooks scope({Accepts::SomeTensors, [&](const at::Tensor& t) -> Unpack {
//             if (!lies_in(buffer, t)) return {};
//             return [=] { return regather(view_of(t)); };  ... }});
class SavedTensorHooks {
 public:
  explicit SavedTensorHooks(Packer packer);
  explicit SavedTensorHooks(PackerRef packer);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
};

// A tensor kept as autograd keeps one: sharing memory, without its graph, and with the version it had.
class VersionedTensor {
 public:
  explicit VersionedTensor(const at::Tensor& t);
  const at::Tensor& get() const;  // throws UsageError if it was written to since

 private:
  at::Tensor tensor_;
  int64_t version_;
};

namespace detail {

// The packers of this thread, outermost first.
const std::vector<PackerRef>& packers();

// Only these are on, on this thread, while alive.
class OnlyPackers {
 public:
  explicit OnlyPackers(std::vector<PackerRef> packers);
  ~OnlyPackers();
  OnlyPackers(const OnlyPackers&) = delete;

 private:
  std::vector<PackerRef> before_;
};

}  // namespace detail
}  // namespace tessera
