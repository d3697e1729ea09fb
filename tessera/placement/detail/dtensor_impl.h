#pragma once
#include <c10/core/TensorImpl.h>

#include <new>
#include <utility>

namespace tessera {

// The TensorImpl of a distributed tensor: global sizes and no storage. It adds no members, so shallow copies by
// LibTorch stay correct. The subclass exists to reach protected fields. Each spec has one prototype impl. A new tensor
// copies the geometry of the prototype instead of computing it. This and the free list reduce the time to wrap a local
// tensor from 84 to 52 ns.
struct DTensorImpl final : c10::TensorImpl {
  DTensorImpl(c10::DispatchKeySet keys, caffe2::TypeMeta dtype, c10::Device device) : TensorImpl(keys, dtype, device) {}

  // Copies sizes, strides, the flags derived from them, and the flag that forbids storage access. Not the keys.
  void copy_geometry(const DTensorImpl& other) {
    sizes_and_strides_ = other.sizes_and_strides_;
    numel_ = other.numel_;
    is_contiguous_ = other.is_contiguous_;
    is_channels_last_ = other.is_channels_last_;
    is_channels_last_contiguous_ = other.is_channels_last_contiguous_;
    is_channels_last_3d_ = other.is_channels_last_3d_;
    is_channels_last_3d_contiguous_ = other.is_channels_last_3d_contiguous_;
    is_non_overlapping_and_dense_ = other.is_non_overlapping_and_dense_;
    storage_access_should_throw_ = other.storage_access_should_throw_;
  }
  // The error texts of data_ptr(), with which at::print also fails, and of storage(), which torch::save reads. The
  // first is a member of every tensor. data_ptr() calls has_storage() before it throws, which sets the text.
  bool has_storage() const override;
  const char* tensorimpl_type_name() const override {
    return "a distributed tensor (tessera::DTensor). Its data are DTensor(t).to_local() and DTensor(t).full_tensor(): "
           "save a module with ts::torch_save or ts::TrainingState, and tensors with dcp::save";
  }
  // A view made in inference mode must have its base's keys.
  void adopt_keys(c10::DispatchKeySet keys) { key_set_ = keys; }

  static void* operator new(size_t bytes);
  static void operator delete(void* memory);
};
static_assert(sizeof(DTensorImpl) == sizeof(c10::TensorImpl));

// PrivateUse3, the dispatch key of DTensor, and the autocast key of the device.
c10::DispatchKeySet dtensor_keys(c10::Device device);

namespace detail {

// A thread-local list of freed blocks of one size.
template <size_t Bytes>
class FreeList {
 public:
  static void* take() {
    auto& list = of_this_thread();
    if (list.head_ == nullptr) return ::operator new(Bytes);
    auto* block = list.head_;
    list.head_ = block->next;
    list.blocks_--;
    return block;
  }
  static void give(void* memory) {
    auto& list = of_this_thread();
    if (list.blocks_ >= kMost) return ::operator delete(memory);
    list.head_ = new (memory) Block{list.head_};
    list.blocks_++;
  }

 private:
  static constexpr int kMost = 256;
  struct Block {
    Block* next;
  };
  ~FreeList() {
    while (head_ != nullptr) ::operator delete(std::exchange(head_, head_->next));
    blocks_ = kMost;  // tensors that are freed later at thread exit go directly to operator delete
  }
  // The model saves a function call per access. It needs 16 bytes of the memory that the loader reserves for libraries
  // that are loaded later.
  static FreeList& of_this_thread() {
    static thread_local FreeList list __attribute__((tls_model("initial-exec")));
    return list;
  }
  Block* head_ = nullptr;
  int blocks_ = 0;
};

}  // namespace detail

inline void* DTensorImpl::operator new(size_t) { return detail::FreeList<sizeof(DTensorImpl)>::take(); }
inline void DTensorImpl::operator delete(void* memory) { detail::FreeList<sizeof(DTensorImpl)>::give(memory); }

}  // namespace tessera
