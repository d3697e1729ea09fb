#include "tessera/compile/detail/trace/collective_placeholder.h"

#include "tessera/base/error.h"
#include "tessera/comm/communicator.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/ops/zeros.h>

#include <numeric>
#include <vector>

namespace tessera::compiler {
namespace {

using CollectiveArgs = std::vector<c10::IValue>;

// Zeros like x, with another size along one dim.
at::Tensor zeros_with_size(const at::Tensor& x, int64_t dim, int64_t size) {
  auto sizes = x.sizes().vec();
  sizes[static_cast<size_t>(dim)] = size;
  return at::zeros(sizes, x.options());
}
int64_t sum_of_sizes(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

int64_t rank_in_group(const c10::IValue& group) { return group.toCustomClass<comm::Communicator>()->rank(); }

// For all_gather_coalesced and reduce_scatter_coalesced. Argument 2 holds the sizes of tensor 0 on each rank, then
// those of tensor 1, and so on. size_of(sizes) gives the size of a result.
template <class F>
c10::IValue coalesced_zeros(const CollectiveArgs& args, F size_of) {
  const auto xs = args[0].toTensorVector();
  const auto dims = args[1].toIntVector(), sizes = args[2].toIntVector();
  const auto ranks = static_cast<int64_t>(sizes.size() / std::max<size_t>(xs.size(), 1));
  std::vector<at::Tensor> made;
  for (size_t i = 0; i < xs.size(); i++) {
    const auto first = sizes.begin() + static_cast<ptrdiff_t>(i) * ranks;
    made.push_back(zeros_with_size(xs[i], dims[i], size_of(std::vector<int64_t>(first, first + ranks))));
  }
  return made;
}

struct CollectivePlaceholder {
  const char* name;
  c10::IValue (*result)(const CollectiveArgs& args);
};

// Contiguous, as the result of a collective is. A run that finds other strides than the trace has to wait for the
// result at once, to copy it.
at::Tensor contiguous_zeros(const at::Tensor& x) { return at::zeros(x.sizes(), x.options()); }

constexpr CollectivePlaceholder kCollectivePlaceholders[] = {
    {"tessera::all_reduce", [](const CollectiveArgs& a) -> c10::IValue { return contiguous_zeros(a[0].toTensor()); }},
    {"tessera::all_reduce_coalesced",
     [](const CollectiveArgs& a) -> c10::IValue {
       std::vector<at::Tensor> made;
       for (const at::Tensor& x : a[0].toTensorList()) made.push_back(contiguous_zeros(x));
       return made;
     }},
    {"tessera::all_gather",
     [](const CollectiveArgs& a) -> c10::IValue {
       return zeros_with_size(a[0].toTensor(), a[1].toInt(), sum_of_sizes(a[2].toIntVector()));
     }},
    {"tessera::all_gather_coalesced",
     [](const CollectiveArgs& a) -> c10::IValue { return coalesced_zeros(a, sum_of_sizes); }},
    {"tessera::reduce_scatter",
     [](const CollectiveArgs& a) -> c10::IValue {
       return zeros_with_size(a[0].toTensor(), a[1].toInt(),
                              a[2].toIntVector()[static_cast<size_t>(rank_in_group(a[4]))]);
     }},
    {"tessera::reduce_scatter_coalesced",
     [](const CollectiveArgs& a) -> c10::IValue {
       return coalesced_zeros(
           a, [&](const std::vector<int64_t>& sizes) { return sizes[static_cast<size_t>(rank_in_group(a[4]))]; });
     }},
    {"tessera::all_to_all",
     [](const CollectiveArgs& a) -> c10::IValue {
       const auto split = a[2].toIntVector(), concatenated = a[4].toIntVector();
       auto part = zeros_with_size(a[0].toTensor(), a[1].toInt(), split[static_cast<size_t>(rank_in_group(a[5]))]);
       return zeros_with_size(part, a[3].toInt(), sum_of_sizes(concatenated));
     }},
    {"tessera::broadcast", [](const CollectiveArgs& a) -> c10::IValue { return contiguous_zeros(a[0].toTensor()); }},
};

}  // namespace

void push_collective_placeholder(const c10::OperatorHandle& collective, torch::jit::Stack* stack) {
  const OpModesOff off;
  const auto count = collective.schema().arguments().size();
  const CollectiveArgs args(stack->end() - static_cast<ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  if (collective.schema().is_mutable()) {
    if (!collective.schema().returns().empty()) stack->push_back(args[0]);
    return;
  }
  for (const auto& each : kCollectivePlaceholders)
    if (collective.operator_name().name == each.name) return stack->push_back(each.result(args));
  TESSERA_FAIL(InternalError, "compile: trace/collective_placeholder.cpp has no entry for ",
               collective.operator_name());
}

}  // namespace tessera::compiler
