#include "tessera/pipelining/detail/action_table.h"

#include "tessera/base/error.h"

namespace tessera::pipelining {
namespace {

std::string_view without_blanks(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

// Takes the front of `text` up to `separator`, and the separator.
std::string_view take_until(std::string_view& text, char separator) {
  const size_t end = std::min(text.find(separator), text.size());
  const std::string_view front = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return front;
}

}  // namespace

std::string to_csv(const ActionTable& table) {
  std::string text;
  for (const RankActions& row : table) {
    for (size_t i = 0; i < row.size(); ++i) {
      if (i > 0) text += ',';
      if (row[i]) text += to_string(*row[i]);
    }
    text += '\n';
  }
  return text;
}

ActionTable parse_csv(std::string_view text) {
  ActionTable table;
  while (!text.empty()) {
    std::string_view line = take_until(text, '\n');
    RankActions row;
    for (bool more = !without_blanks(line).empty(); more;) {
      more = line.find(',') != std::string_view::npos;
      const std::string_view cell = without_blanks(take_until(line, ','));
      try {
        row.push_back(cell.empty() ? std::nullopt : std::optional(parse_action(cell)));
      } catch (const UsageError& error) {
        TESSERA_FAIL(UsageError, "line ", table.size() + 1, ", column ", row.size() + 1,
                     " of a pipeline schedule: ", error.what_without_backtrace());
      }
    }
    table.push_back(std::move(row));
  }
  return table;
}

}  // namespace tessera::pipelining
