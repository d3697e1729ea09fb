#include "tessera/compile/detail/report/html.h"

#include <cmath>
#include <iomanip>
#include <ostream>
#include <sstream>

namespace tessera::compiler::html {

std::string escaped(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += c;
    }
  }
  return safe;
}

std::string bytes(int64_t count) {
  if (std::abs(count) < 1000) return std::to_string(count) + " B";
  const char* units[] = {"kB", "MB", "GB", "TB"};
  auto number = static_cast<double>(count) / 1000;
  size_t unit = 0;
  for (; std::abs(number) >= 999.95 && unit < 3; unit++) number /= 1000;
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << number << " " << units[unit];
  return text.str();
}

void row(std::ostream& out, std::initializer_list<std::string> cells, const char* cell) {
  out << "<tr>";
  for (const auto& each : cells) out << "<" << cell << ">" << each << "</" << cell << ">";
  out << "</tr>\n";
}

}  // namespace tessera::compiler::html
