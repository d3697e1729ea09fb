#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::compiler {

struct DiffLine {
  enum class Kind : uint8_t { Same, Removed, Added } kind;
  size_t line;  // Removed: index in the text before; else index in the text after
  bool operator==(const DiffLine&) const = default;
};

// The line diff of two texts, in order (patience diff). Nearly every line of a program defines a value and so occurs
// once. Lines that occur once in both texts and keep their order are matched first, then the equal lines next to them.
//
//   before  a b c d      a removed, b same, x added, c same, d same
//   after   b x c d
std::vector<DiffLine> diff_lines(const std::vector<std::string>& before, const std::vector<std::string>& after);

}  // namespace tessera::compiler
