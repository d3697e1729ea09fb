// An archive of torch.save with one tensor, as in a .distcp file: an accepted tensor is inside of the file.
#include "tessera/base/detail/mapped_file.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/distcp.h"

#include "fuzz_targets.h"
#include "memory_file.h"

namespace tessera::fuzz {

void fuzz_torch_archive(std::string_view input) {
  if (input.empty()) return;  // no file to map
  const MemoryFile memory(input);
  try {
    const auto file = std::make_shared<const MappedFile>(memory.path(), "the archive");
    const auto tensor = dcp::read_torch_archive(file, {0, input.size()}, "the archive");
    if (tensor.numel() == 0) return;
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
    const auto* bytes = static_cast<const volatile char*>(tensor.const_data_ptr());
    const auto size = static_cast<int64_t>(tensor.element_size());
    for (const int64_t at : {int64_t{0}, last * size, last * size + size - 1}) (void)bytes[at];  // asan finds others
  } catch (const UsageError&) {
  }
}

}  // namespace tessera::fuzz
