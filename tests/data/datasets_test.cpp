// Generated additions, token files, batches and prefetching.
#include "tessera/base/error.h"
#include "tessera/data/dataset.h"
#include "tessera/data/detail/arithmetic.h"
#include "tessera/data/detail/prefetch.h"
#include "tessera/data/token_file.h"
#include "tessera/testing/expect_error.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

namespace tessera::data {
namespace {

struct Sample {
  std::string text, answer;  // all tokens; the targets
};
Sample sample(const Dataset& dataset, int64_t number) {
  std::vector<int64_t> input(static_cast<size_t>(dataset.length())), target = input;
  dataset.read(number, input, target);
  Sample found;
  for (const auto token : input) found.text += static_cast<char>(token);
  found.text += static_cast<char>(target.back());
  for (const auto token : target)
    if (token != kIgnored) found.answer += static_cast<char>(token);
  return found;
}

TEST(Arithmetic, AnswersAreCorrect) {
  for (int64_t digits : {1, 2, 3, 8}) {
    const auto split = arithmetic({.digits = digits});
    for (const auto& dataset : {split.training, split.held_out})
      for (int64_t i = 0; i < 50; i++) {
        const auto [text, answer] = sample(*dataset, i);
        ASSERT_EQ(static_cast<int64_t>(text.size()), dataset->length() + 1);
        const auto d = static_cast<size_t>(digits);
        const int64_t a = std::stoll(text.substr(0, d)), b = std::stoll(text.substr(d + 1, d));
        EXPECT_EQ(text[d], '+');
        EXPECT_EQ(text[2 * d + 1], '=');
        EXPECT_EQ(static_cast<int64_t>(answer.size()), dataset->counted());
        EXPECT_EQ(std::stoll(std::string(answer.rbegin(), answer.rend())), a + b) << text;
        EXPECT_TRUE(text.ends_with(answer));
      }
  }
}

TEST(Arithmetic, TrainingNeverContainsHeldOutProblems) {
  const auto split = arithmetic({.digits = 1});  // a hundred problems: both parts produce all of theirs
  std::set<std::string> training, held_out;
  for (int64_t i = 0; i < 3000; i++) training.insert(sample(*split.training, i).text);
  for (int64_t i = 0; i < 300; i++) held_out.insert(sample(*split.held_out, i).text);
  EXPECT_EQ(training.size() + held_out.size(), 100u);
  EXPECT_GE(held_out.size(), 2u);
  for (const auto& text : held_out) EXPECT_FALSE(training.contains(text)) << text;
}

TEST(Arithmetic, DependsOnTheSeedOnly) {
  const auto text = [](uint64_t seed) { return sample(*arithmetic({.seed = seed}).training, 5).text; };
  EXPECT_EQ(text(1), text(1));
  EXPECT_NE(text(1), text(2));
  EXPECT_EQ(sample(*arithmetic({.digits = 3, .seed = 0}).training, 0).text, "776+286=2601");  // on every machine
  EXPECT_ERROR(UsageError, arithmetic({.digits = 9}), "digits is 9; it must be 1 to 8");
}

TEST(Arithmetic, ShowReversesTheAnswer) {
  const auto dataset = arithmetic({.digits = 2}).held_out;
  EXPECT_EQ(dataset->prompt().size(), 6u);
  EXPECT_EQ(dataset->prompt().back(), '=');
  std::vector<int64_t> tokens;
  for (const char c : std::string("37+45=280")) tokens.push_back(c);
  EXPECT_EQ(dataset->show(tokens), "37+45=082");
}

// A file that is removed after the test.
struct TemporaryFile {
  explicit TemporaryFile(const std::string& bytes, const std::string& ending = ".txt")
      : path((std::filesystem::temp_directory_path() /
              ("tessera_data_test_" + std::to_string(getpid()) + "_" + std::to_string(count++) + ending))
                 .string()) {
    std::ofstream(path, std::ios::binary) << bytes;
  }
  ~TemporaryFile() { std::filesystem::remove(path); }
  TemporaryFile(const TemporaryFile&) = delete;
  static inline int count = 0;
  const std::string path;
};

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}
std::string header(int32_t magic, int32_t version, int32_t tokens) {
  std::vector<int32_t> ints(256);
  ints[0] = magic, ints[1] = version, ints[2] = tokens;
  return bytes_of(ints);
}

TEST(TokenFile, TextIsSplitIntoWindowsOfBytes) {
  const TemporaryFile file("abcdefgh");
  const auto split = token_windows(std::make_shared<TokenFile>(file.path), {.length = 3});
  EXPECT_EQ(split.training->samples(), 1);
  EXPECT_EQ(split.held_out->samples(), 1);
  EXPECT_EQ(sample(*split.training, 0).text, "abcd");
  EXPECT_EQ(sample(*split.held_out, 0).text, "defg");
  EXPECT_EQ(sample(*split.held_out, 0).answer, "efg");
  EXPECT_EQ(all_windows(std::make_shared<TokenFile>(file.path), {.length = 7})->samples(), 1);
}

TEST(TokenFile, ReadsLlmCAndHeaderlessFormats) {
  const std::vector<uint16_t> small{5, 50256, 7};
  const std::vector<uint32_t> large{5, 128000, 7};
  const struct {
    std::string bytes;
    TokenLayout layout, found;
    int64_t second;
  } cases[] = {{header(20240520, 1, 3) + bytes_of(small), TokenLayout::Auto, TokenLayout::LlmC, 50256},
               {header(20240801, 7, 3) + bytes_of(large), TokenLayout::Auto, TokenLayout::LlmC, 128000},
               {bytes_of(small), TokenLayout::Uint16, TokenLayout::Uint16, 50256},
               {bytes_of(large), TokenLayout::Uint32, TokenLayout::Uint32, 128000}};
  for (const auto& c : cases) {
    const TemporaryFile file(c.bytes, ".bin");
    const TokenFile tokens(file.path, c.layout);
    EXPECT_EQ(tokens.layout(), c.found);
    ASSERT_EQ(tokens.size(), 3);
    std::vector<int64_t> read(3);
    tokens.read(0, read, 200000);
    EXPECT_EQ(read, (std::vector<int64_t>{5, c.second, 7}));
    const auto where = c10::str("token ", c.second, " at position 1 of '", file.path);
    EXPECT_ERROR(UsageError, tokens.read(0, read, 1000), where.c_str(), "is beyond the model's vocabulary of 1000");
  }
}

TEST(TokenFile, ErrorsNameTheProblemAndTheFile) {
  const auto expect_error = [](const std::string& bytes, TokenLayout layout, const std::string& part,
                               const std::string& ending = ".bin") {
    const TemporaryFile file(bytes, ending);
    EXPECT_ERROR(UsageError, TokenFile(file.path, layout), part, file.path);
  };
  const std::string three = bytes_of(std::vector<uint16_t>{1, 2, 3});
  expect_error("", TokenLayout::Auto, " empty");
  expect_error(three, TokenLayout::Auto,
               "do not start with a header of llm.c; set the format with --data-format uint16");
  expect_error(three, TokenLayout::LlmC, "have 6 bytes; a header of llm.c alone takes 1024");
  expect_error(header(7, 1, 3) + three, TokenLayout::LlmC, "start with 7; a header of llm.c starts with 20240520");
  expect_error(header(20240520, 2, 3) + three, TokenLayout::Auto, "has version 2; the version for GPT-2 tokens is 1");
  expect_error(header(20240520, 1, 4) + three, TokenLayout::Auto, "announces 4 tokens, and the file has 3");
  expect_error(header(20240520, 1, 0), TokenLayout::Auto, "have a header and no tokens");
  expect_error(three + "x", TokenLayout::Uint16, "not a multiple of the 2 bytes per token of format uint16");
  EXPECT_ERROR(UsageError, TokenFile("/nowhere/at/all"), "cannot read the data '/nowhere/at/all': No such file");
  EXPECT_ERROR(UsageError, TokenFile("/tmp"), "'/tmp'");
  EXPECT_ERROR(UsageError, parse_token_layout("utf8"), "unknown data format 'utf8'; write auto, text");
  const TemporaryFile file("abcdef");
  EXPECT_ERROR(UsageError, token_windows(std::make_shared<TokenFile>(file.path), {.length = 3}),
               "the data have 6 tokens, and two samples of 3", "need 7");
}

TEST(Batch, PaddingRowsAreIgnored) {
  const TemporaryFile file("abcdefgh");
  const auto all = all_windows(std::make_shared<TokenFile>(file.path), {.length = 2});
  const auto batch = read_batch(*all, {1, kPadding});
  EXPECT_TRUE(at::equal(batch.input, at::tensor({99, 100, 0, 0}).to(at::kLong).view({2, 2})));
  EXPECT_TRUE(at::equal(batch.target, at::tensor({100, 101, -100, -100}).to(at::kLong).view({2, 2})));
}

TEST(Prefetch, ReturnsValuesInOrderThenRethrows) {
  int made = 0;
  Prefetch<int> ahead(
      [&] {
        if (made == 5) throw std::runtime_error("no more");
        return made++;
      },
      2);
  for (int i = 0; i < 5; i++) EXPECT_EQ(ahead.next(), i);
  for (int i = 0; i < 2; i++) EXPECT_THROW(ahead.next(), std::runtime_error);
}

TEST(Prefetch, DestructorStopsTheThread) {
  Prefetch<int> ahead([] { return 1; }, 3);  // the queue is full and the thread waits when this ends
  EXPECT_EQ(ahead.next(), 1);
}

}  // namespace
}  // namespace tessera::data
