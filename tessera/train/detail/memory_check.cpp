#include "tessera/train/detail/memory_check.h"

#include "tessera/base/error.h"
#include "tessera/train/detail/device.h"

#include <cmath>

namespace tessera::train {
namespace {

struct MinMemory {
  double fixed;       // does not depend on the batch
  double per_sample;  // of the global batch
};

MinMemory min_memory(const TrainConfig& config, int64_t ranks) {
  const auto mesh = mesh_shape(config, ranks);
  const auto model = model_config(config.model);
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  const double data_ranks = number(extent(mesh, "dp") * extent(mesh, "fsdp")), tp = number(extent(mesh, "tp"));
  const double length = number(sequence_length(config));
  const double vocab = number(std::visit([](const auto& m) { return m.vocab_size; }, model));
  constexpr double kState = 16;   // fp32 parameter, gradient and two moments
  constexpr double kTokens = 16;  // int64 input and target
  const double cp = number(extent(mesh, "cp")), ep = number(expert_ranks(config.parallel));
  // With pp, a rank may have no head.
  const double logits = extent(mesh, "pp") > 1 ? 0 : 4 * vocab / tp / number(config.training.accumulate) / cp;
  const double batches = number(config.data.prefetch) + 1;
  return {
      kState * number(models::parameter_count(model)) / (number(extent(mesh, "fsdp") * extent(mesh, "pp")) * tp * ep),
      length * (batches * kTokens + logits) / data_ranks};
}

double gigabytes(double bytes) { return std::round(bytes / 1e8) / 10; }

}  // namespace

double min_memory_bytes(const TrainConfig& config, int64_t ranks) {
  const auto min = min_memory(config, ranks);
  return min.fixed + min.per_sample * static_cast<double>(config.training.batch);
}

void check_memory(const TrainConfig& config, int64_t ranks, int64_t ranks_on_device) {
  const auto device = static_cast<double>(device_memory_bytes(at::Device(config.training.device)));
  if (device <= 0) return;
  const double available = device / static_cast<double>(ranks_on_device), needed = min_memory_bytes(config, ranks);
  if (needed <= available) return;
  const auto shared = ranks_on_device > 1 ? c10::str(", which ", ranks_on_device, " ranks share") : "";
  const auto min = min_memory(config, ranks);
  const auto batch = static_cast<int64_t>((available - min.fixed) / min.per_sample);
  const auto what = c10::str("a rank needs at least ", gigabytes(needed), " GB, and its device has ", gigabytes(device),
                             " GB", shared, ": ");
  TESSERA_CHECK(batch >= 1, UsageError, what, "parameters, gradients and optimizer state alone take ",
                gigabytes(min.fixed), " GB; use a smaller model, or more ranks on the axes fsdp or tp");
  TESSERA_FAIL(UsageError, what, "training.batch is ", config.training.batch, " and can be at most ", batch);
}

}  // namespace tessera::train
