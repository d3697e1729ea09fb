#include "tessera/train/detail/loader.h"

#include "tessera/base/error.h"
#include "tessera/data/detail/arithmetic.h"
#include "tessera/data/token_file.h"

#include <chrono>

namespace tessera::train {

data::Split open_data(const TrainConfig& config) {
  const auto& d = config.data;
  const int64_t vocab = std::visit([](const auto& m) { return m.vocab_size; }, model_config(config.model));
  if (d.path == "arithmetic") {
    TESSERA_CHECK(vocab > '=', UsageError, "the tokens of arithmetic are characters up to '=', which is token ",
                  int{'='}, ", beyond the model's vocabulary of ", vocab, "; set model.vocab_size to ", '=' + 1,
                  " or more");
    return data::arithmetic({.digits = d.digits, .seed = config.training.seed});
  }
  const data::WindowOptions windows{
      .length = sequence_length(config), .vocab_size = vocab, .held_out = d.validation_fraction};
  const auto layout = data::parse_token_layout(d.format);
  const auto file = std::make_shared<data::TokenFile>(d.path, layout);
  if (d.validation_path.empty()) return data::token_windows(file, windows);
  return {data::all_windows(file, windows),
          data::all_windows(std::make_shared<data::TokenFile>(d.validation_path, layout), windows)};
}

Loader::Loader(std::shared_ptr<const data::Dataset> dataset, const data::SamplerOptions& options, int64_t rank,
               int64_t ranks, size_t depth)
    : start_([dataset = std::move(dataset), options, rank, ranks, depth](int64_t position) {
        data::Sampler sampler(options);
        sampler.set_position(position);
        return std::make_unique<Batches>(
            [dataset, sampler, rank, ranks]() mutable {
              const auto global = sampler.next();
              const int64_t samples = global.samples();
              return LoadedBatch{read_batch(*dataset, global.rows_of(rank, ranks)), samples,
                                 samples * dataset->counted(), sampler.position()};
            },
            depth);
      }),
      batches_(start_(0)) {}

void Loader::set_position(int64_t position) {
  batches_.reset();  // drops the batches that were read ahead
  batches_ = start_(position);
}

LoadedBatch Loader::next() {
  const auto start = std::chrono::steady_clock::now();
  auto batch = batches_->next();
  seconds_waited_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return batch;
}

}  // namespace tessera::train
