#pragma once
#include <c10/util/StringUtil.h>

#include <cerrno>
#include <string>

// Errors of system calls. The value of errno decides who can fix it: a wrong path is a UsageError, a full disk is a
// SystemError.
namespace tessera {

// Throws "<message>: No space left on device": SystemError if the machine failed, else UsageError.
[[noreturn]] void raise_errno(int error, const std::string& message);

}  // namespace tessera

// Requires: a system call has set errno if the condition is false.
// Example:  TESSERA_CHECK_ERRNO(fd >= 0, "cannot create the file '", path, "'");
#define TESSERA_CHECK_ERRNO(condition, ...)                         \
  do {                                                              \
    if (C10_UNLIKELY(!(condition))) {                               \
      const int found_errno = errno;                                \
      ::tessera::raise_errno(found_errno, ::c10::str(__VA_ARGS__)); \
    }                                                               \
  } while (false)
