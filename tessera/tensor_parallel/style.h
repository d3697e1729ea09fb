#pragma once
#include "tessera/placement/placement.h"

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

// How a module is to be laid out over one mesh axis: what becomes of its parameters, what its inputs are and shall be,
// and what it gives. Plain values with the names of PyTorch's classes; parallelize_module acts on them.
//
// Example:  ColwiseParallel{.output_layouts = Replicate()}
//
// They print as plans write them, and only what differs from the defaults:  colwise(output=R)
namespace tessera {

// One layout an input or output; none for one that is left alone. A single layout stands for a list of one.
// Example:  Layouts x = Shard(1);      Layouts xs = {Shard(1), std::nullopt};
struct Layouts {
  std::vector<std::optional<Placement>> each;

  Layouts() = default;
  Layouts(Placement one) : each{one} {}                                                // NOLINT
  Layouts(std::initializer_list<std::optional<Placement>> several) : each(several) {}  // NOLINT
  explicit Layouts(std::vector<std::optional<Placement>> several) : each(std::move(several)) {}
  size_t size() const { return each.size(); }
  bool empty() const { return each.empty(); }
  const std::optional<Placement>& operator[](size_t i) const { return each[i]; }
  bool operator==(const Layouts&) const = default;
};

// A weight that is several, one after the other along its outputs (q, k and v in one Linear), of which each is cut by
// itself: so many of equal size, or of the sizes given.
// Example:  Sections qkv = 3;      Sections grouped = {512, 128, 128};
struct Sections {
  int64_t count = 1;
  std::vector<int64_t> sizes;  // empty: equal

  Sections() = default;
  Sections(std::integral auto equal) : count(equal) {}                                       // NOLINT
  Sections(std::initializer_list<int64_t> given) : Sections(std::vector<int64_t>(given)) {}  // NOLINT
  explicit Sections(std::vector<int64_t> given) : count(static_cast<int64_t>(given.size())), sizes(std::move(given)) {}
  bool operator==(const Sections&) const = default;
};

// Linear: outputs are cut, weight and bias S(0). Embedding: the features of each row are cut, weight S(1).
// The input must be whole.
struct ColwiseParallel {
  Placement input_layouts = Replicate();  // how a plain input is to be understood
  Placement output_layouts = Shard(-1);
  bool use_local_output = true;  // give a plain tensor, this rank's piece
  int64_t block = 1;             // cut only between multiples of this: the features of a head
  Sections sections = {};
  bool operator==(const ColwiseParallel&) const = default;
};

// Linear: inputs are cut, weight S(1), bias whole; the terms of the output are added up. Embedding: rows are cut,
// weight S(0); its input is whole and input_layouts says so.
struct RowwiseParallel {
  Placement input_layouts = Shard(-1);
  Placement output_layouts = Replicate();
  bool use_local_output = true;
  int64_t block = 1;
  bool operator==(const RowwiseParallel&) const = default;
};

// Norms and Dropout: parameters whole, activations cut along the sequence.
struct SequenceParallel {
  int64_t sequence_dim = 1;
  bool use_local_output = false;
  bool operator==(const SequenceParallel&) const = default;
};

// Inputs by position: those of input_layouts become those of desired_input_layouts, before forward runs. C++ has no
// keyword arguments, and so PyTorch's two fields for them are not here.
struct PrepareModuleInput {
  Layouts input_layouts = {}, desired_input_layouts = {};
  bool use_local_output = false;  // give the module plain tensors. PyTorch's name for it.
  bool operator==(const PrepareModuleInput&) const = default;
};

// The same for what forward gives.
struct PrepareModuleOutput {
  Layouts output_layouts = {}, desired_output_layouts = {};
  bool use_local_output = true;
  bool operator==(const PrepareModuleOutput&) const = default;
};

// Both.
struct PrepareModuleInputOutput {
  Layouts input_layouts = {}, desired_input_layouts = {};
  bool use_local_input = false;
  Layouts output_layouts = {}, desired_output_layouts = {};
  bool use_local_output = true;
  bool operator==(const PrepareModuleInputOutput&) const = default;
};

using Style = std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput,
                           PrepareModuleInputOutput>;
template <class T>
concept IsStyle = std::constructible_from<Style, T>;

// Throws UsageError for a style that no module could have: lists of different lengths, a layout wanted for an input
// that is said to be no tensor, a Partial that nobody can make, a block or a section of no size.
void check(const Style& style);

std::string to_string(const Style& style);  // "colwise(output=R)"
std::ostream& operator<<(std::ostream& out, const Style& style);
std::ostream& operator<<(std::ostream& out, const Layouts& layouts);    // "S(1)", "[S(1), _]"
std::ostream& operator<<(std::ostream& out, const Sections& sections);  // "3", "[512, 128, 128]"

}  // namespace tessera
