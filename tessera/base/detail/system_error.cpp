#include "tessera/base/detail/system_error.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <iterator>
#include <system_error>

namespace tessera {
namespace {

// The call is right, and the machine cannot do it now.
constexpr int kMachineFailed[] = {EAGAIN, EDQUOT, EFBIG, EIO, EMFILE, ENFILE, ENOBUFS, ENOMEM, ENOSPC, ESTALE};

}  // namespace

void raise_errno(int error, const std::string& message) {
  const auto text = message + ": " + std::generic_category().message(error);
  if (std::find(std::begin(kMachineFailed), std::end(kMachineFailed), error) != std::end(kMachineFailed))
    TESSERA_FAIL(SystemError, text);
  TESSERA_FAIL(UsageError, text);
}

}  // namespace tessera
