#pragma once
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <string>

// What can go wrong, by who can mend it. All are c10::Error, so a program that already catches LibTorch's errors
// catches ours. A message says what was asked, what was found, and what to write instead.
namespace tessera {

struct UsageError : c10::Error {  // the caller can fix it
  using c10::Error::Error;
};
struct ShardingError : c10::Error {  // placements cannot combine
  using c10::Error::Error;
};
struct CommError : c10::Error {  // a peer, or the wire
  using c10::Error::Error;
};
struct InternalError : c10::Error {  // a bug of ours
  using c10::Error::Error;
};

namespace detail {
template <class Kind>
[[noreturn]] void raise(const char* function, const char* file, uint32_t line, const std::string& message) {
  throw Kind({function, file, line}, message);
}
}  // namespace detail
}  // namespace tessera

// Example:  TESSERA_CHECK(axis < ndim, UsageError, "mesh has ", ndim, " axes; axis ", axis, " was asked for");
#define TESSERA_CHECK(condition, Kind, ...)                                                          \
  do {                                                                                               \
    if (C10_UNLIKELY(!(condition)))                                                                  \
      ::tessera::detail::raise<::tessera::Kind>(__func__, __FILE__, static_cast<uint32_t>(__LINE__), \
                                                ::c10::str(__VA_ARGS__));                            \
  } while (false)

#define TESSERA_FAIL(Kind, ...)                                                                  \
  ::tessera::detail::raise<::tessera::Kind>(__func__, __FILE__, static_cast<uint32_t>(__LINE__), \
                                            ::c10::str(__VA_ARGS__))
