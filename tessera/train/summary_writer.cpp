#include "tessera/comm/world.h"
#include "tessera/train/detail/event_file.h"
#include "tessera/train/trainer.h"

namespace tessera {

SummaryWriter::SummaryWriter(const std::string& log_dir) {
  if (!World::has_current() || World::current().rank() == 0) file_ = std::make_unique<train::EventFile>(log_dir, 1);
}
SummaryWriter::~SummaryWriter() = default;

void SummaryWriter::add_scalar(const std::string& tag, double value, int64_t step) {
  if (file_) file_->write_scalars(step, {{tag, static_cast<float>(value)}});
}

void SummaryWriter::add_histogram(const std::string& tag, const at::Tensor& values, int64_t step) {
  const auto histograms = train::histograms_of(std::vector<at::Tensor>{values});
  if (file_) file_->on_histograms(step, {{tag, histograms[0]}});
}

void SummaryWriter::add_histograms(const torch::nn::Module& module, int64_t step) {
  const auto histograms = train::histograms_of(module);
  if (file_) file_->on_histograms(step, histograms);
}

}  // namespace tessera
