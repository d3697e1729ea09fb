#include "tessera/data/detail/arithmetic.h"

#include "tessera/base/error.h"
#include "tessera/data/detail/splitmix64.h"

#include <algorithm>

namespace tessera::data {
namespace {

struct Problem {
  int64_t a, b;
};

bool is_held_out(const Problem& p) {
  return splitmix64(static_cast<uint64_t>(p.a), static_cast<uint64_t>(p.b)) % 16 == 0;
}

class Arithmetic final : public Dataset {
 public:
  Arithmetic(const ArithmeticOptions& options, bool held_out) : options_(options), held_out_(held_out) {
    for (int64_t i = 0; i < options.digits; i++) limit_ *= 10;
  }

  int64_t samples() const override { return kEndless; }
  int64_t length() const override { return 3 * options_.digits + 2; }
  int64_t vocab_size() const override { return 256; }
  int64_t counted() const override { return options_.digits + 1; }

  void read(int64_t sample, std::span<int64_t> input, std::span<int64_t> target) const override {
    const auto text = write(problem(sample));
    for (size_t i = 0; i + 1 < text.size(); i++) {
      input[i] = static_cast<unsigned char>(text[i]);
      target[i] = i < question() - 1 ? kIgnored : static_cast<unsigned char>(text[i + 1]);
    }
  }

  std::string prompt() const override { return write(problem(0)).substr(0, question()); }
  // Reverses the answer, so that its highest digit is first.
  std::string show(std::span<const int64_t> tokens) const override {
    auto text = Dataset::show(tokens);
    if (text.size() > question()) std::reverse(text.begin() + static_cast<int64_t>(question()), text.end());
    return text;
  }

 private:
  size_t question() const { return static_cast<size_t>(2 * options_.digits + 2); }  // characters up to '='

  Problem problem(int64_t sample) const {
    const auto limit = static_cast<uint64_t>(limit_);
    for (uint64_t attempt = 0;; attempt++) {
      const uint64_t draw = splitmix64(splitmix64(options_.seed, static_cast<uint64_t>(sample)), attempt);
      const Problem p{static_cast<int64_t>(draw % limit), static_cast<int64_t>(splitmix64(draw) % limit)};
      if (is_held_out(p) == held_out_) return p;
    }
  }

  std::string write(const Problem& p) const {
    std::string text;
    for (int64_t unit = limit_ / 10; unit > 0; unit /= 10) text += digit(p.a, unit);
    text += '+';
    for (int64_t unit = limit_ / 10; unit > 0; unit /= 10) text += digit(p.b, unit);
    text += '=';
    for (int64_t unit = 1; unit <= limit_; unit *= 10) text += digit(p.a + p.b, unit);
    return text;
  }
  static char digit(int64_t number, int64_t unit) { return static_cast<char>('0' + number / unit % 10); }

  ArithmeticOptions options_;
  bool held_out_;
  int64_t limit_ = 1;  // summands are less than this
};

}  // namespace

Split arithmetic(const ArithmeticOptions& options) {
  TESSERA_CHECK(options.digits >= 1 && options.digits <= 8, UsageError, "arithmetic: digits is ", options.digits,
                "; it must be 1 to 8");
  return {std::make_shared<Arithmetic>(options, false), std::make_shared<Arithmetic>(options, true)};
}

}  // namespace tessera::data
