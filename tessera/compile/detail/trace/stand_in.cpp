#include "tessera/compile/detail/trace/stand_in.h"

#include "tessera/base/error.h"
#include "tessera/tracing/op_mode.h"
#include "tessera/comm/communicator.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <functional>
#include <numeric>
#include <unordered_map>

namespace tessera::compiler {
namespace {

using Args = std::vector<c10::IValue>;

at::Tensor zeros_with(const at::Tensor& x, int64_t dim, int64_t size) {
  auto sizes = x.sizes().vec();
  sizes[static_cast<size_t>(dim)] = size;
  return at::zeros(sizes, x.options());
}
int64_t sum(const std::vector<int64_t>& list) { return std::accumulate(list.begin(), list.end(), int64_t{0}); }

int64_t rank_in(const c10::IValue& group) { return group.toCustomClass<comm::Communicator>()->rank(); }

// Of all_gather_coalesced and reduce_scatter_coalesced: sizes has a row of ranks for each tensor.
template <class F>
c10::IValue each_of_list(const Args& args, F size_of) {
  const auto xs = args[0].toTensorVector();
  const auto dims = args[1].toIntVector(), sizes = args[2].toIntVector();
  const auto ranks = static_cast<int64_t>(sizes.size() / std::max<size_t>(xs.size(), 1));
  std::vector<at::Tensor> made;
  for (size_t i = 0; i < xs.size(); i++) {
    const auto row = sizes.begin() + static_cast<ptrdiff_t>(i) * ranks;
    made.push_back(zeros_with(xs[i], dims[i], size_of(std::vector<int64_t>(row, row + ranks))));
  }
  return made;
}

struct Row {
  const char* name;
  c10::IValue (*give)(const Args& args);
};

constexpr Row kRows[] = {
    {"tessera::all_reduce", [](const Args& a) -> c10::IValue { return at::zeros_like(a[0].toTensor()); }},
    {"tessera::all_reduce_coalesced",
     [](const Args& a) -> c10::IValue {
       std::vector<at::Tensor> made;
       for (const at::Tensor& x : a[0].toTensorList()) made.push_back(at::zeros_like(x));
       return made;
     }},
    {"tessera::all_gather",
     [](const Args& a) -> c10::IValue { return zeros_with(a[0].toTensor(), a[1].toInt(), sum(a[2].toIntVector())); }},
    {"tessera::all_gather_coalesced", [](const Args& a) -> c10::IValue { return each_of_list(a, sum); }},
    {"tessera::reduce_scatter",
     [](const Args& a) -> c10::IValue {
       return zeros_with(a[0].toTensor(), a[1].toInt(), a[2].toIntVector()[static_cast<size_t>(rank_in(a[4]))]);
     }},
    {"tessera::reduce_scatter_coalesced",
     [](const Args& a) -> c10::IValue {
       return each_of_list(
           a, [&](const std::vector<int64_t>& sizes) { return sizes[static_cast<size_t>(rank_in(a[4]))]; });
     }},
    {"tessera::all_to_all",
     [](const Args& a) -> c10::IValue {
       const auto split = a[2].toIntVector(), cat = a[4].toIntVector();
       auto piece = zeros_with(a[0].toTensor(), a[1].toInt(), split[static_cast<size_t>(rank_in(a[5]))]);
       return zeros_with(piece, a[3].toInt(), sum(cat));
     }},
    {"tessera::broadcast", [](const Args& a) -> c10::IValue { return at::zeros_like(a[0].toTensor()); }},
};

}  // namespace

void stand_in(const c10::OperatorHandle& collective, torch::jit::Stack* stack) {
  const OpModesOff off;
  const auto count = collective.schema().arguments().size();
  const Args args(stack->end() - static_cast<ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  if (collective.schema().is_mutable()) {
    if (!collective.schema().returns().empty()) stack->push_back(args[0]);
    return;
  }
  for (const auto& row : kRows)
    if (collective.operator_name().name == row.name) return stack->push_back(row.give(args));
  TESSERA_FAIL(InternalError, "no stand-in for ", collective.operator_name());
}

}  // namespace tessera::compiler
