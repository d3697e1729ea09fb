#include "tessera/rules/detail/gathered.h"

#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"

#include <algorithm>

namespace tessera::rules {
namespace {

constexpr std::string_view kDataDependent = "the sizes of the result depend on the data";
constexpr std::string_view kAllElements = "every result element can depend on all input elements";
constexpr std::string_view kHostValue = "it returns a value of the host";
constexpr std::string_view kFlatPositions = "positions count through the flattened tensor";
constexpr std::string_view kBatchStatistics = "statistics are computed over the batch";
constexpr std::string_view kNoiseOfAll = "its noise is drawn for the full tensor";
constexpr std::string_view kEmptyMaximum = "a local tensor without elements has no maximum";
constexpr std::string_view kBags = "bags begin at positions that depend on the data";

struct GatheredOp {
  const char* op;
  std::string_view reason;
};

// In LibTorch's list of ops, without those that only sparse, quantized or nested tensors have.
constexpr GatheredOp kGathered[] = {
    {"_batch_norm_with_update_functional", kBatchStatistics},
    {"_ctc_loss", kAllElements},
    {"_ctc_loss.Tensor", kAllElements},
    {"_ctc_loss_backward", kAllElements},
    {"_embedding_bag", kBags},
    {"_embedding_bag_backward", kBags},
    {"_embedding_bag_dense_backward", kBags},
    {"_embedding_bag_forward_only", kBags},
    {"_embedding_bag_per_sample_weights_backward", kBags},
    {"_foreach_max", kEmptyMaximum},
    {"_pdist_backward", kAllElements},
    {"_pdist_forward", kAllElements},
    {"_unique", kDataDependent},
    {"_unique2", kDataDependent},
    {"bincount", kDataDependent},
    {"block_diag", kAllElements},
    {"histc", kAllElements},
    {"histogram.bin_ct", kAllElements},
    {"histogram.bins_tensor", kAllElements},
    {"is_pinned", kHostValue},
    {"linalg_lstsq", kAllElements},
    {"linalg_pinv.atol_rtol_tensor", kAllElements},
    {"masked_scatter", kFlatPositions},
    {"masked_scatter_backward", kFlatPositions},
    {"masked_select", kDataDependent},
    {"nonzero", kDataDependent},
    {"nonzero_static", kFlatPositions},
    {"put", kFlatPositions},
    {"repeat_interleave.Tensor", kDataDependent},
    {"rrelu_with_noise_functional", kNoiseOfAll},
    {"segment_reduce", kAllElements},
    {"unique_consecutive", kDataDependent},
    {"unique_dim", kDataDependent},
    {"unique_dim_consecutive", kDataDependent},
};

}  // namespace

std::string_view gathered_reason(std::string_view op) {
  if (!op.starts_with("aten::")) return "";
  const auto* found =
      std::find_if(std::begin(kGathered), std::end(kGathered), [&](const auto& row) { return op.substr(6) == row.op; });
  return found == std::end(kGathered) ? "" : found->reason;
}

void register_gathered(Registry& to) {
  Family family(to, "gathered");
  for (const auto& row : kGathered)
    family.op(row.op, [](const OpQuery&) {
      Rule rule;
      rule.gathered = true;
      return rule;
    });
}

}  // namespace tessera::rules
