#pragma once
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera::train {

// Lines of cells, a column as wide as its widest cell.
using Lines = std::vector<std::vector<std::string>>;
void print_table(std::ostream& out, const Lines& lines, const std::string& indent = "");

}  // namespace tessera::train
