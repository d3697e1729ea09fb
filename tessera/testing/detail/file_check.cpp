#include "tessera/testing/detail/file_check.h"

#include <c10/util/StringUtil.h>

#include <stdexcept>

namespace tessera::testing {

FileCheck& FileCheck::check(std::string pattern) {
  steps_.push_back({CheckKind::Check, std::move(pattern)});
  return *this;
}
FileCheck& FileCheck::check_next(std::string pattern) {
  steps_.push_back({CheckKind::Next, std::move(pattern)});
  return *this;
}
FileCheck& FileCheck::check_same(std::string pattern) {
  steps_.push_back({CheckKind::Same, std::move(pattern)});
  return *this;
}
FileCheck& FileCheck::check_not(std::string pattern) {
  steps_.push_back({CheckKind::Not, std::move(pattern)});
  return *this;
}
FileCheck& FileCheck::check_count(std::string pattern, int count, bool exactly) {
  for (int i = 0; i < count; i++) check(pattern);
  return exactly ? check_not(std::move(pattern)) : *this;
}

std::string FileCheck::find_error(std::string_view text) const {
  constexpr auto npos = std::string_view::npos;
  size_t at = 0;  // the end of the last match
  std::vector<const CheckStep*> absent;
  const auto absent_in = [&](size_t begin, size_t end) -> std::string {
    for (const CheckStep* step : absent)
      if (text.substr(begin, end - begin).find(step->pattern) != npos)
        return c10::str("'", step->pattern, "' must not be in:\n", text.substr(begin, end - begin));
    absent.clear();
    return "";
  };
  for (const CheckStep& step : steps_) {
    if (step.kind == CheckKind::Not) {
      absent.push_back(&step);
      continue;
    }
    size_t begin = at, end = text.size();
    const size_t line_end = std::min(text.find('\n', at), text.size());
    if (step.kind == CheckKind::Same) end = line_end;
    if (step.kind == CheckKind::Next) {
      begin = std::min(line_end + 1, text.size());
      end = std::min(text.find('\n', begin), text.size());
    }
    const size_t found = text.substr(begin, end - begin).find(step.pattern);
    if (found == npos) return c10::str("'", step.pattern, "' is not in:\n", text.substr(begin, end - begin));
    if (auto error = absent_in(at, begin + found); !error.empty()) return error;
    at = begin + found + step.pattern.size();
  }
  return absent_in(at, text.size());
}

void FileCheck::run(std::string_view text) const {
  if (auto error = find_error(text); !error.empty()) throw std::runtime_error(error);
}

}  // namespace tessera::testing
