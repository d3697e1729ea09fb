#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tessera::testing {

// Checks that a text contains patterns in order, as LLVM's FileCheck does.
// Example:  FileCheck().check("all_gather").check_count("mm", 2).check_not("all_reduce").run(text);
class FileCheck {
 public:
  FileCheck& check(std::string pattern);       // somewhere after the previous match
  FileCheck& check_next(std::string pattern);  // on the line after the previous match
  FileCheck& check_same(std::string pattern);  // on the same line as the previous match, after it
  FileCheck& check_not(std::string pattern);   // not before the next match
  FileCheck& check_count(std::string pattern, int count, bool exactly = false);  // count times; exactly: and not again
  std::string find_error(std::string_view text) const;                           // "" if all checks pass
  void run(std::string_view text) const;  // throws std::runtime_error with the text of find_error()

 private:
  enum class CheckKind { Check, Next, Same, Not };
  struct CheckStep {
    CheckKind kind;
    std::string pattern;
  };
  std::vector<CheckStep> steps_;
};

}  // namespace tessera::testing
