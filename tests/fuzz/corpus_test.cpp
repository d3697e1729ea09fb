// Replays the corpora of the fuzzers, every prefix of each file (a truncated file), and each file with brackets that
// are nested very deeply.
#include "fuzz_targets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <typeinfo>
#include <vector>

namespace tessera::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLevels = 100'000;

std::vector<fs::path> corpus_files(const FuzzTarget& target) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(fs::path(TESSERA_CORPUS) / target.name))
    files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::string file_bytes(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The finding, or "".
std::string finding(const FuzzTarget& target, std::string_view input) {
  try {
    target.run(input);
    return "";
  } catch (const std::exception& error) {
    return c10::str(typeid(error).name(), ": ", error.what());
  }
}

template <class F>
void for_each_corpus_file(F f) {
  leave_out_backtraces();
  for (const auto& target : fuzz_targets()) {
    const auto files = corpus_files(target);
    EXPECT_GE(files.size(), 10u) << target.name;
    for (const auto& file : files) f(target, file, file_bytes(file));
  }
}

TEST(Corpus, EveryFileAndEveryPrefixIsParsedOrRefused) {
  for_each_corpus_file([](const FuzzTarget& target, const fs::path& file, const std::string& bytes) {
    const size_t step = 1 + bytes.size() / 256;  // files with a header of 1 KiB
    for (size_t size = bytes.size() % step; size <= bytes.size(); size += step) {
      const auto found = finding(target, std::string_view(bytes).substr(0, size));
      ASSERT_EQ(found, "") << file << ", the first " << size << " bytes";
    }
  });
}

TEST(Corpus, DeepNestingIsParsedOrRefused) {
  for_each_corpus_file([](const FuzzTarget& target, const fs::path& file, const std::string& bytes) {
    for (const char open : {'[', '{', '('}) {
      const auto at = bytes.find(open);
      if (at == bytes.npos) continue;
      auto deep = bytes;
      deep.insert(at, kLevels, open);
      ASSERT_EQ(finding(target, deep), "") << file << " with " << kLevels << " " << open;
    }
  });
}

}  // namespace
}  // namespace tessera::fuzz
