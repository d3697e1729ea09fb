#pragma once
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::testing {

// Runs `body` for every combination of the values; the last one varies fastest. Reports all combinations that throw.
// Example:  subtests([&](bool offload, int64_t dim) { ... }, std::vector{false, true}, std::vector<int64_t>{0, 1});
template <class Body, class... Values>
void subtests(const Body& body, const std::vector<Values>&... values) {
  std::string report;
  int ran = 0, failed = 0;
  const auto run = [&](const auto&... chosen) {
    std::ostringstream label;
    ((label << (label.tellp() > 0 ? ", " : "") << chosen), ...);
    ran++;
    try {
      body(chosen...);
    } catch (const std::exception& error) {
      failed++;
      report += "\n(" + label.str() + "): " + error.what();
    }
  };
  // Binds the values one by one.
  const auto choose = [&](const auto& self, auto bound, const auto& first, const auto&... rest) -> void {
    for (auto&& value : first) {
      auto with = [&](const auto&... more) { bound(value, more...); };
      if constexpr (sizeof...(rest) == 0)
        with();
      else
        self(self, with, rest...);
    }
  };
  choose(choose, run, values...);
  if (failed)
    throw std::runtime_error(std::to_string(failed) + " of " + std::to_string(ran) + " sub-tests failed:" + report);
}

}  // namespace tessera::testing
