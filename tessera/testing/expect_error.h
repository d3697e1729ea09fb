#pragma once
#include <c10/util/Exception.h>

#include <string>

namespace tessera::testing {

// What the error of a call says, without its backtrace; "nothing was thrown" if nothing was. Another kind of error than
// E passes through. Example:  EXPECT_SAYS(message_of<UsageError>([&] { t.redistribute({Partial()}); }), "Partial is no
// target");
template <class E = c10::Error, class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

}  // namespace tessera::testing

// For gtest.
#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

// The call throws a Kind, and its message has all the parts. Example:  EXPECT_ERROR(UsageError, f(3), "f(3)", "try 2");
#define EXPECT_ERROR(Kind, call, ...)                                                     \
  do {                                                                                    \
    const std::string said = ::tessera::testing::message_of<Kind>([&] { (void)(call); }); \
    for (const std::string part : {__VA_ARGS__}) EXPECT_SAYS(said, part);                 \
  } while (false)
