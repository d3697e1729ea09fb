#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::compiler {

struct DiffLine {
  enum class Kind : uint8_t { Same, Removed, Added } kind;
  size_t line;  // Removed: of the text before; else of the text after
  bool operator==(const DiffLine&) const = default;
};

// What changed from one list of lines to another, in order. Lines of a program define values, so nearly all of them are
// there once: those that both texts have once are matched, as many as keep their order, and the equal ones beside them.
//
//   before  a b c d      a removed, b same, x added, c same, d same
//   after   b x c d
std::vector<DiffLine> diff_lines(const std::vector<std::string>& before, const std::vector<std::string>& after);

}  // namespace tessera::compiler
