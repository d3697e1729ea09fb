#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

// Saved-tensor hooks (PyTorch: torch.autograd.graph.saved_tensors_hooks). LibTorch has them in Python only. Tessera
// installs an autograd engine that calls the packers of the thread for each tensor that autograd saves:
//
//   torch::exp(x)   autograd saves the result   ->  a packer accepts it and returns an unpack function
//   backward()      autograd needs the tensor   ->  the unpack function returns it
//
// Order. Packers that accept only some tensors come first, innermost first. (FSDP has one for tensors in a buffer that
// it will free.) Then comes the innermost packer that accepts all tensors (a checkpoint, SaveOnCpu). So the nesting of
// the two kinds of scopes does not matter:
//
//   { packs weights { checkpoint { ... } } }       the first scope packs weights, the checkpoint packs activations
//   { checkpoint { packs weights { ... } } }       the same
//
// A tensor that no packer accepts is saved as usual, with the usual check for in-place writes. Of two packers that
// accept all tensors only the inner one is called, as in PyTorch.
namespace tessera {

// Returns a saved tensor. Backward calls it on the thread that needs the tensor, once for each use.
using Unpack = std::function<at::Tensor()>;
// Accepts a tensor and returns its unpack function, which must return the same values, sizes, dtype and device. Returns
// an empty function to decline. Runs with gradients disabled. It must not store `t` itself: `t` may own the graph that
// will own the packed tensor. Store a VersionedTensor, or anything that the tensor can be computed from.
using Pack = std::function<Unpack(const at::Tensor& t)>;

// Whether a packer may decline tensors.
enum class Accepts : uint8_t { SomeTensors, AllTensors };
// A pack hook.
struct Packer {
  Accepts accepts;  // AllTensors: `pack` never declines
  Pack pack;
};
using PackerRef = std::shared_ptr<const Packer>;

// Activates a packer on this thread for the lifetime of the object. Scopes must end in the reverse order of their
// start.
// Throws UsageError if Python's torch is loaded in the process, because its autograd engine does not call packers.
// Example:  SavedTensorHooks scope({Accepts::SomeTensors, [&](const at::Tensor& t) -> Unpack {
//             if (!is_view_of(buffer, t)) return {};
//             return [=] { return all_gather_again(view_info(t)); };  ... }});
class SavedTensorHooks {
 public:
  explicit SavedTensorHooks(Packer packer);
  explicit SavedTensorHooks(PackerRef packer);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
};

// Saves a tensor as autograd does: shares its memory, drops its graph, and stores its version counter.
class VersionedTensor {
 public:
  explicit VersionedTensor(const at::Tensor& t);
  const at::Tensor& get() const;  // throws UsageError if the tensor was modified in place since

 private:
  at::Tensor tensor_;
  int64_t version_;
};

namespace detail {

// The active packers of this thread, outermost first.
const std::vector<PackerRef>& packers();

// In this scope, only these packers are active on this thread.
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
