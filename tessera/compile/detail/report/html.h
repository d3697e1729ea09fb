#pragma once
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <string_view>

namespace tessera::compiler::html {

std::string escaped(std::string_view text);  // escapes text and attributes in double quotes
std::string bytes(int64_t count);            // "512 B", "4.1 kB", "12.5 MB"

// Writes <tr><td>..</td>..</tr>. Cells are HTML.
void row(std::ostream& out, std::initializer_list<std::string> cells, const char* cell = "td");

}  // namespace tessera::compiler::html
