#pragma once
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera::train {

// Lines of cells. Each column is as wide as its widest cell.
using TextTable = std::vector<std::vector<std::string>>;
void print_table(std::ostream& out, const TextTable& table, const std::string& indent = "");

}  // namespace tessera::train
