#pragma once
#include "tessera/data/sampler.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tessera::data {

constexpr int64_t kIgnored = -100;  // a target that does not count; models::loss knows it

// Samples by number: `length()` tokens, and after each the token to be foretold. Reading is safe from several threads.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t samples() const = 0;  // or kEndless
  virtual int64_t length() const = 0;
  virtual int64_t vocab_size() const = 0;  // tokens are below it
  // How many targets of a sample count: the same for each, so that all ranks know how many a batch has.
  virtual int64_t counted() const { return length(); }
  virtual void read(int64_t sample, std::span<int64_t> input, std::span<int64_t> target) const = 0;

  // What a text to go on with begins with, at the end of training; and tokens as a person reads them.
  virtual std::string prompt() const { return "\n"; }
  virtual std::string show(std::span<const int64_t> tokens) const;
};

// What is trained on and what is held back to see what was learned. No sample of one is in the other.
struct Split {
  std::shared_ptr<const Dataset> training, held_out;
};

}  // namespace tessera::data
