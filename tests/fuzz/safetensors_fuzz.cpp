// A .safetensors file: every tensor of an accepted file can be read, and its header can be written and parsed again.
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/safetensors_file.h"

#include "fuzz_targets.h"
#include "memory_file.h"

namespace tessera::fuzz {

void fuzz_safetensors(std::string_view input) {
  const MemoryFile memory(input);
  dcp::Header header;
  try {
    const dcp::SafetensorsFile file(memory.path());
    header = file.header();
    for (const auto& entry : header.tensors) {
      const auto tensor = file.tensor(entry);
      require(tensor.sizes() == c10::IntArrayRef(entry.shape) && tensor.nbytes() == entry.end - entry.begin, "tensor '",
              entry.name, "' has sizes ", tensor.sizes());
      require(file.find(entry.name) == nullptr || file.find(entry.name)->dtype == tensor.scalar_type(), entry.name);
    }
  } catch (const UsageError&) {
    return;
  }
  const auto bytes = dcp::write_header(header);
  const uint64_t data = header.tensors.empty() ? 0 : header.tensors.back().end;
  require(dcp::parse_header(std::string_view(bytes).substr(8), bytes.size() + data, "what was written") == header,
          "the written header is another header: ", bytes.substr(8));
  try {
    dcp::open_source(memory.path());  // reads the sharding info of Hugging Face's files
  } catch (const UsageError&) {
  }
}

}  // namespace tessera::fuzz
