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

// Parallel styles (PyTorch: ParallelStyle): how a module is parallelized over one mesh axis. A style defines the
// placements of its parameters, of its inputs and of its outputs. Styles are values with the names of PyTorch's
// classes. parallelize_module applies them.
//
// Example:  ColwiseParallel{.output_layouts = Replicate()}
//
// A style prints as plans write it, with the fields that differ from the defaults:  colwise(output=R)
namespace tessera {

// One placement per input or output; nullopt leaves a tensor unchanged. A single placement means a list of one.
// Example:  Layouts x = Shard(1);      Layouts xs = {Shard(1), std::nullopt};
struct Layouts {
  std::vector<std::optional<Placement>> each;

  // Conversions from one placement and from a list.
  Layouts() = default;
  Layouts(Placement one) : each{one} {}                                                // NOLINT
  Layouts(std::initializer_list<std::optional<Placement>> several) : each(several) {}  // NOLINT
  explicit Layouts(std::vector<std::optional<Placement>> several) : each(std::move(several)) {}
  // The list.
  size_t size() const { return each.size(); }
  bool empty() const { return each.empty(); }
  const std::optional<Placement>& operator[](size_t i) const { return each[i]; }
  bool operator==(const Layouts&) const = default;
};

// The sections of a fused weight, along its output features (q, k and v in one Linear). Each section is sharded
// separately. Give the number of equal sections, or their sizes.
// Example:  Sections qkv = 3;      Sections grouped = {512, 128, 128};
struct Sections {
  int64_t count = 1;
  std::vector<int64_t> sizes;  // empty: equal sizes

  // Conversions from a number of equal sections and from a list of sizes.
  Sections() = default;
  Sections(std::integral auto equal) : count(equal) {}                                       // NOLINT
  Sections(std::initializer_list<int64_t> given) : Sections(std::vector<int64_t>(given)) {}  // NOLINT
  explicit Sections(std::vector<int64_t> given) : count(static_cast<int64_t>(given.size())), sizes(std::move(given)) {}
  bool operator==(const Sections&) const = default;
};

// Shards the output features. Linear: weight and bias are S(0). Embedding: weight is S(1). The input is redistributed
// to Replicate().
struct ColwiseParallel {
  Placement input_layouts = Replicate();  // the placement of a plain input
  Placement output_layouts = Shard(-1);   // the placement that the output is redistributed to
  bool use_local_output = true;           // return the local tensor, not a DTensor
  int64_t block = 1;                      // keep blocks of this many features together, such as the features of a head
  Sections sections = {};                 // of a fused weight
  bool operator==(const ColwiseParallel&) const = default;
};

// Shards the input features. Linear: weight is S(1), bias is replicated, and the partial output is reduced. Embedding:
// weight is S(0); set input_layouts = Replicate() for its input.
struct RowwiseParallel {
  Placement input_layouts = Shard(-1);     // the placement of a plain input
  Placement output_layouts = Replicate();  // the placement that the output is redistributed to
  bool use_local_output = true;            // return the local tensor, not a DTensor
  int64_t block = 1;                       // keep blocks of this many features together
  bool operator==(const RowwiseParallel&) const = default;
};

// For norms and Dropout: parameters are replicated, activations are sharded along the sequence.
struct SequenceParallel {
  int64_t sequence_dim = 1;
  bool use_local_output = false;  // return the local tensor, not a DTensor
  bool operator==(const SequenceParallel&) const = default;
};

// Redistributes the inputs of a module, by position, from input_layouts to desired_input_layouts. PyTorch's two fields
// for keyword arguments do not exist here.
struct PrepareModuleInput {
  Layouts input_layouts = {}, desired_input_layouts = {};
  bool use_local_output = false;  // pass local tensors to the module, not DTensors (PyTorch's name)
  bool operator==(const PrepareModuleInput&) const = default;
};

// Redistributes the outputs of a module, by position.
struct PrepareModuleOutput {
  Layouts output_layouts = {}, desired_output_layouts = {};
  bool use_local_output = true;  // return local tensors, not DTensors
  bool operator==(const PrepareModuleOutput&) const = default;
};

// Redistributes the inputs and the outputs of a module.
struct PrepareModuleInputOutput {
  Layouts input_layouts = {}, desired_input_layouts = {};
  bool use_local_input = false;  // pass local tensors to the module
  Layouts output_layouts = {}, desired_output_layouts = {};
  bool use_local_output = true;  // return local tensors
  bool operator==(const PrepareModuleInputOutput&) const = default;
};

// Any style.
using Style = std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput,
                           PrepareModuleInputOutput>;
template <class T>
concept IsStyle = std::constructible_from<Style, T>;

// Throws UsageError for an invalid style: lists of different lengths, a desired layout for an input without a layout, a
// desired Partial, a block or section without features.
void check(const Style& style);

// Printing. The text of a Style can be parsed by parse_style.
std::string to_string(const Style& style);  // "colwise(output=R)"
std::ostream& operator<<(std::ostream& out, const Style& style);
std::ostream& operator<<(std::ostream& out, const Layouts& layouts);    // "S(1)", "[S(1), _]"
std::ostream& operator<<(std::ostream& out, const Sections& sections);  // "3", "[512, 128, 128]"

}  // namespace tessera
