#pragma once
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <type_traits>

// The errors of this library. All are c10::Error, so a program that catches LibTorch's errors
// catches these too. A message states what was asked, what was found, and what to write instead.
namespace tessera {

// A call is wrong. The caller can fix it.
struct UsageError : c10::Error {
  using c10::Error::Error;
};
// Placements cannot be combined, or an op has no sharding rule.
struct ShardingError : c10::Error {
  using c10::Error::Error;
};
// A peer or the network failed.
struct CommError : c10::Error {
  using c10::Error::Error;
};
// The machine failed: the disk is full, a device has an I/O error, memory or file descriptors are used up. The call was
// right.
struct SystemError : c10::Error {
  using c10::Error::Error;
};
// A defect of this library. The message ends with "(internal error, please report)".
struct InternalError : c10::Error {
  using c10::Error::Error;
};

namespace detail {
template <class Kind>
[[noreturn]] void raise(const char* function, const char* file, uint32_t line, const std::string& message) {
  if constexpr (std::is_same_v<Kind, InternalError>)
    throw Kind({function, file, line}, message + " (internal error, please report)");
  else
    throw Kind({function, file, line}, message);
}
}  // namespace detail
}  // namespace tessera

// Throws an error of the given kind if the condition is false. The message is built only then.
// Example:  TESSERA_CHECK(axis < ndim, UsageError, "axis ", axis, " of a mesh with ", ndim, " axes");
#define TESSERA_CHECK(condition, Kind, ...)                                                          \
  do {                                                                                               \
    if (C10_UNLIKELY(!(condition)))                                                                  \
      ::tessera::detail::raise<::tessera::Kind>(__func__, __FILE__, static_cast<uint32_t>(__LINE__), \
                                                ::c10::str(__VA_ARGS__));                            \
  } while (false)

// Throws an error of the given kind.
#define TESSERA_FAIL(Kind, ...)                                                                  \
  ::tessera::detail::raise<::tessera::Kind>(__func__, __FILE__, static_cast<uint32_t>(__LINE__), \
                                            ::c10::str(__VA_ARGS__))
