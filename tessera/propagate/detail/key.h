#pragma once
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>

#include <bit>
#include <optional>
#include <string_view>
#include <type_traits>

// The key under which a decision is remembered: the specs of the distributed arguments and the arguments that are not
// tensors, as words. Read in one pass, from a boxed stack or from typed arguments; both readers must give the same
// words (a test compares them), or a typed call would miss what a boxed one stored.
//
// A Scalar or a float counts by type only: a learning rate that changes every step must not make every step a miss, and
// no rule looks at such a value. Ints, bools and int lists are dims, sizes and flags, and count by value.
namespace tessera::propagate {

inline constexpr uint64_t kNone = 0x8000'0000'0000'0007;  // no dim, size or flag has this value
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
  detail::MeshState* mesh() const { return mesh_; }  // of the first distributed argument; null: there is none

  uint64_t hash() const {
    uint64_t h = size_;
    const uint32_t n = size_ < kInline ? size_ : kInline;
    for (uint32_t i = 0; i < n; i++) h = mix(h, inline_[i]);
    for (auto word : more_) h = mix(h, word);
    return h;
  }
  static uint64_t mix(uint64_t h, uint64_t word) {
    const auto product = static_cast<unsigned __int128>(h ^ word ^ 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
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

// A plain tensor next to distributed ones: it has one element (or is about to be refused), so its value is no key.
inline uint64_t plain_word(const at::Tensor& t) {
  return 1 | static_cast<uint64_t>(t.scalar_type()) << 8 | static_cast<uint64_t>(t.dim()) << 16 |
         static_cast<uint64_t>(t.unsafeGetTensorImpl()->is_wrapped_number()) << 24 |
         static_cast<uint64_t>(t.numel() == 1) << 25;
}

// `spec_of` is given by the caller: the layer that knows what a distributed tensor is stands above this one.
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
