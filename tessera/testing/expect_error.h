#pragma once
#include <c10/util/Exception.h>

#include <string>

// Checks of error messages with gtest.
namespace tessera::testing {

// The message of the E that the call throws, without its backtrace. "nothing was thrown" if the call does not throw.
// An exception of another type propagates.
// Example:  EXPECT_CONTAINS(error_message<UsageError>([&] { t.redistribute({Partial()}); }), "must not be Partial");
template <class E = c10::Error, class Call>
std::string error_message(Call&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

}  // namespace tessera::testing

// The std::string `text` contains `part`.
#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

// The call throws a Kind whose message contains all parts.
// Example:  EXPECT_ERROR(UsageError, f(3), "f(3)", "try 2");
#define EXPECT_ERROR(Kind, call, ...)                                                                       \
  do {                                                                                                      \
    const std::string error_message_found = ::tessera::testing::error_message<Kind>([&] { (void)(call); }); \
    for (const std::string& part : std::initializer_list<std::string>{__VA_ARGS__})                         \
      EXPECT_CONTAINS(error_message_found, part);                                                           \
  } while (false)
