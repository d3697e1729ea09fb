#pragma once
#include "tessera/compile/detail/trace/arguments.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <iosfwd>
#include <string>
#include <vector>

namespace tessera::compiler {

// What a program was made for: it may run again only where this is the same.
struct Signature {
  struct Shape {
    Type type;
    SpecRef spec;  // how a distributed tensor lies; null: plain
    bool requires_grad = false;
    int shares_with = -1;  // an earlier tensor in the same memory
    int64_t apart = 0;     // how many bytes after that one it begins
    bool operator==(const Shape&) const = default;
  };
  std::vector<const void*> objects;   // modules and optimizers
  std::vector<uint64_t> generations;  // of optimizers: how often their state and options were exchanged
  std::vector<char> modes;            // training or not, module by module; gradient mode; autocast
  std::vector<Shape> tensors;
  std::vector<double> numbers;
  std::vector<std::string> words;
  bool operator==(const Signature&) const = default;

  // What differs first, to tell why a step is compiled again: "argument 0 is f32[64, 10], it was f32[32, 10]".
  std::string difference(const Signature& before) const;
};
Signature signature_of(const Arguments& arguments);

}  // namespace tessera::compiler
