#include "tessera/train/detail/text_table.h"

#include <algorithm>
#include <ostream>

namespace tessera::train {

void print_table(std::ostream& out, const TextTable& table, const std::string& indent) {
  std::vector<size_t> widths;
  for (const auto& line : table)
    for (size_t i = 0; i < line.size(); i++) {
      if (i == widths.size()) widths.push_back(0);
      widths[i] = std::max(widths[i], line[i].size());
    }
  for (const auto& line : table) {
    std::string text;
    for (size_t i = 0; i < line.size(); i++) text += line[i] + std::string(widths[i] - line[i].size() + 2, ' ');
    out << indent << text.substr(0, text.find_last_not_of(' ') + 1) << '\n';
  }
}

}  // namespace tessera::train
