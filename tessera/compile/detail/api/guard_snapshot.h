#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::compiler {

// A copy of the memory that guards have read when they held: fields of tensors and modules, lists of submodules. While
// that memory is unchanged, the guards hold, so most calls compare memory and evaluate no guard. All addresses are
// known beforehand. So the processor loads many of them at once, which matters after a step, when its caches hold other
// data.
class GuardSnapshot {
 public:
  // Adds the words of 8 bytes that contain the memory. If its address was read from memory, add that first: unchanged()
  // does not read behind the first difference.
  void add(const void* begin, size_t bytes);
  template <class T>
  void add(const T& object) {
    add(&object, sizeof(object));
  }
  // Adds a vector and its elements.
  template <class Element>
  void add_list(const std::vector<Element>& list) {
    add(list);
    add(list.data(), list.size() * sizeof(Element));
  }
  // False if nothing was added.
  bool unchanged() const;
  void clear() { ranges_.clear(), words_.clear(); }

 private:
  struct Range {
    const uint64_t* begin;
    size_t words;
  };
  std::vector<Range> ranges_;
  std::vector<uint64_t> words_;  // of all ranges
};

}  // namespace tessera::compiler
