#pragma once
#include "tessera/data/sampler.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tessera::data {

// The target of tokens that the loss ignores (PyTorch: ignore_index).
constexpr int64_t kIgnored = -100;

// A map-style dataset for language models: sample i is `length()` input tokens and, for each, the token to predict.
// read() is safe to call from several threads.
class Dataset {
 public:
  virtual ~Dataset() = default;
  // Number of samples, or kEndless.
  virtual int64_t samples() const = 0;
  // Tokens per sample.
  virtual int64_t length() const = 0;
  // All tokens are less than this.
  virtual int64_t vocab_size() const = 0;
  // Number of targets per sample that are not kIgnored. It is equal for all samples, so every rank knows the number of
  // targets in a batch.
  virtual int64_t counted() const { return length(); }
  // Whether each token is one byte of text.
  virtual bool has_byte_tokens() const { return false; }
  // Reads one sample. Both spans have length() elements.
  virtual void read(int64_t sample, std::span<int64_t> input, std::span<int64_t> target) const = 0;

  // The prompt for text generation after training.
  virtual std::string prompt() const { return "\n"; }
  // Tokens as readable text.
  virtual std::string show(std::span<const int64_t> tokens) const;
};

// The samples that one rank reads for a step.
struct Batch {
  at::Tensor input, target;  // (rows, length), kLong; padding rows have input 0 and target kIgnored
};

// Reads the samples `rows` (with kPadding for padding rows), as GlobalBatch::rows_of returns them.
Batch read_batch(const Dataset& dataset, const std::vector<int64_t>& rows);

// The training and the validation part of a dataset. They have no sample in common.
struct Split {
  std::shared_ptr<const Dataset> training, held_out;
};

}  // namespace tessera::data
