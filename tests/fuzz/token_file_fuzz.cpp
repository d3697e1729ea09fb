// Token files in every layout: each sample of an accepted file can be read.
#include "tessera/base/error.h"
#include "tessera/data/token_file.h"

#include "fuzz_targets.h"
#include "memory_file.h"

#include <limits>
#include <vector>

namespace tessera::fuzz {
namespace {

using data::TokenLayout;

void read_all_samples(const data::Dataset& dataset) {
  std::vector<int64_t> input(static_cast<size_t>(dataset.length())), target(input.size());
  for (int64_t sample = 0; sample < dataset.samples(); sample++) dataset.read(sample, input, target);
}

void read_token_file(const std::string& path, TokenLayout layout) {
  const auto file = std::make_shared<data::TokenFile>(path, layout);
  require(file->size() > 0 && file->layout() != TokenLayout::Auto, "a file of ", file->size(), " tokens");
  for (const int64_t length : {int64_t{1}, int64_t{3}, std::numeric_limits<int64_t>::max()}) {
    const data::WindowOptions options{.length = length, .vocab_size = 50257};
    try {
      read_all_samples(*data::all_windows(file, options));
    } catch (const UsageError&) {
    }
    const auto [training, held_out] = data::token_windows(file, options);
    require(training->samples() > 0 && held_out->samples() > 0, "an empty part");
  }
}

}  // namespace

void fuzz_token_file(std::string_view input) {
  const MemoryFile memory(input);
  for (const auto layout :
       {TokenLayout::Auto, TokenLayout::Text, TokenLayout::LlmC, TokenLayout::Uint16, TokenLayout::Uint32}) {
    try {
      read_token_file(memory.path(), layout);
    } catch (const UsageError&) {
    }
  }
}

}  // namespace tessera::fuzz
