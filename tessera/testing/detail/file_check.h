#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tessera::testing {

// Checks a text for patterns in order, as LLVM's FileCheck does.
// Example:  FileCheck().check("all_gather").check_count("mm", 2).check_not("all_reduce").run(text);
class FileCheck {
 public:
  FileCheck& check(std::string pattern);       // somewhere after what was found before
  FileCheck& check_next(std::string pattern);  // on the line after it
  FileCheck& check_same(std::string pattern);  // on the same line, further on
  FileCheck& check_not(std::string pattern);   // not before the next one that is checked for
  FileCheck& check_count(std::string pattern, int count, bool exactly = false);  // so many times; exactly: no more
  std::string find_error(std::string_view text) const;                           // "" if all hold
  void run(std::string_view text) const;  // throws std::runtime_error with find_error

 private:
  enum class Kind { Check, Next, Same, Not };
  struct Step {
    Kind kind;
    std::string pattern;
  };
  std::vector<Step> steps_;
};

}  // namespace tessera::testing
