#pragma once
#include "tessera/base/detail/hash.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string_view>
#include <type_traits>

// The cache key of a decision: the specs of the distributed arguments and the values of the other arguments, as 64-bit
// words. It is read in one pass, from a boxed stack or from typed arguments. Both readers must give the same words (a
// test compares them). Otherwise a typed call would not find the decision that a boxed call stored.
//
// A Scalar or a float adds only its type to the key. A learning rate that changes every step must not cause a cache
// miss every step, and no rule reads such a value. Ints, bools and int lists are dims, sizes and flags; their values
// are part of the key.
namespace tessera::propagate {

inline constexpr uint64_t kNone = 0x8000'0000'0000'0007;  // a value that no dim, size or flag has
inline constexpr uint64_t kUndefined = 2;

class Key {
 public:
  void push(uint64_t word) {
    if (C10_LIKELY(size_ < kInline))
      inline_[size_++] = word;
    else
      more_.push_back(word), size_++;
  }
  void push_spec(const TensorSpec* spec) {
    if (!mesh_) mesh_ = spec->mesh.state();
    push(reinterpret_cast<uint64_t>(spec));
  }
  uint32_t size() const { return size_; }
  uint64_t operator[](uint32_t i) const { return i < kInline ? inline_[i] : more_[i - kInline]; }
  detail::MeshState* mesh() const { return mesh_; }  // of the first distributed argument, or null

  uint64_t hash() const {
    uint64_t h = size_;
    const uint32_t n = size_ < kInline ? size_ : kInline;
    for (uint32_t i = 0; i < n; i++) h = hash_combine(h, inline_[i]);
    for (auto word : more_) h = hash_combine(h, word);
    return h;
  }
  bool equals(c10::ArrayRef<uint64_t> words) const {
    if (words.size() != size_) return false;
    const uint32_t n = size_ < kInline ? size_ : kInline;
    for (uint32_t i = 0; i < n; i++)
      if (words[i] != inline_[i]) return false;
    for (size_t i = 0; i < more_.size(); i++)
      if (words[kInline + i] != more_[i]) return false;
    return true;
  }

 private:
  static constexpr uint32_t kInline = 40;
  uint64_t inline_[kInline];
  uint32_t size_ = 0;
  detail::MeshState* mesh_ = nullptr;
  std::vector<uint64_t> more_;
};

// The word of a plain tensor among distributed ones. It has one element (or the call throws). Its value is not part of
// the key.
inline uint64_t plain_word(const at::Tensor& t) {
  return 1 | static_cast<uint64_t>(t.scalar_type()) << 8 | static_cast<uint64_t>(t.dim()) << 16 |
         static_cast<uint64_t>(t.unsafeGetTensorImpl()->is_wrapped_number()) << 24 |
         static_cast<uint64_t>(t.numel() == 1) << 25;
}

// The caller gives `spec_of`, because distributed tensors are defined in a higher layer (dtensor).
template <class SpecOf>
struct KeyReader {
  Key& key;
  SpecOf spec_of;  // const TensorSpec* (const at::Tensor&), null for a plain tensor

  C10_ALWAYS_INLINE void read(const at::Tensor& t) {
    if (!t.defined()) return key.push(kUndefined);
    if (const TensorSpec* spec = spec_of(t))
      key.push_spec(spec);
    else
      key.push(plain_word(t));
  }
  C10_ALWAYS_INLINE void read(const at::Scalar& s) { key.push(static_cast<uint64_t>(s.type())); }
  C10_ALWAYS_INLINE void read(int64_t v) { key.push(static_cast<uint64_t>(v)); }
  C10_ALWAYS_INLINE void read(bool v) { key.push(static_cast<uint64_t>(v)); }
  C10_ALWAYS_INLINE void read(double) { key.push(0); }
  C10_ALWAYS_INLINE void read(std::string_view v) { key.push(std::hash<std::string_view>{}(v)); }
  C10_ALWAYS_INLINE void read(c10::Device v) {
    key.push(static_cast<uint64_t>(v.type()) << 8 | static_cast<uint8_t>(v.index()));
  }
  C10_ALWAYS_INLINE void read(const c10::SymInt& v) { key.push(static_cast<uint64_t>(v.as_int_unchecked())); }
  C10_ALWAYS_INLINE void read(c10::SymIntArrayRef a) {
    key.push(a.size());
    for (const auto& v : a) key.push(static_cast<uint64_t>(v.as_int_unchecked()));
  }
  C10_ALWAYS_INLINE void read(c10::IntArrayRef a) {
    key.push(a.size());
    for (auto v : a) key.push(static_cast<uint64_t>(v));
  }
  C10_ALWAYS_INLINE void read(at::OptionalIntArrayRef a) {
    if (a)
      read(*a);
    else
      key.push(kNone);
  }
  C10_ALWAYS_INLINE void read(at::TensorList list) {
    key.push(list.size());
    for (const auto& t : list) read(t);
  }
  C10_ALWAYS_INLINE void read(const at::ITensorListRef& list) {
    key.push(list.size());
    for (const auto& t : list) read(t);
  }
  template <class T>
  C10_ALWAYS_INLINE void read(const std::optional<T>& v) {
    if (!v)
      key.push(std::is_same_v<T, at::Tensor> ? kUndefined : kNone);
    else if constexpr (std::is_enum_v<T> || std::is_same_v<T, bool>)
      key.push(static_cast<uint64_t>(*v));
    else
      read(*v);
  }
};

}  // namespace tessera::propagate
