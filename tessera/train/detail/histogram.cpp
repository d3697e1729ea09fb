#include "tessera/train/detail/histogram.h"

#include "tessera/dtensor/dtensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

namespace tessera::train {
namespace {

constexpr int64_t kBuckets = 64, kSums = 3;  // num, sum, sum of squares
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// This rank's elements that are finite. None on a rank that has copies of another rank's elements.
at::Tensor counted_values(const at::Tensor& t) {
  auto values = tessera::detail::local_or_self(t).detach().reshape({-1});
  if (is_dtensor(t)) {
    const auto& spec = DTensor(t).spec();
    const auto coordinate = *spec.mesh.get_coordinate();
    for (size_t i = 0; i < spec.placements.size(); i++)
      if (!spec.placements[i].is_sharded() && coordinate[i] != 0) values = values.narrow(0, 0, 0);
  }
  values = values.to(at::kFloat);
  return values.masked_select(values.isfinite());
}

at::Tensor without_partial(const at::Tensor& t) {
  if (!is_dtensor(t) || !DTensor(t).spec().has_partial()) return t;
  const auto& spec = DTensor(t).spec();
  Placements placements(spec.placements.begin(), spec.placements.end());
  for (auto& placement : placements)
    if (placement.is_partial()) placement = Replicate();
  return DTensor(t.detach()).redistribute(placements);
}

void reduce_over(const DeviceMesh& mesh, at::Tensor& values, ReduceOp op) {
  for (int64_t axis = 0; mesh && axis < mesh.ndim(); axis++) mesh.get_group(axis)->all_reduce(values, op).wait();
}

// Of tensors on one mesh; none: plain tensors.
void add_histograms(const DeviceMesh& mesh, const std::vector<at::Tensor>& tensors, const std::vector<size_t>& which,
                    std::vector<Histogram>& all) {
  const auto count = static_cast<int64_t>(which.size());
  const auto device = tessera::detail::local_or_self(tensors[which[0]]).device();
  std::vector<at::Tensor> values;
  auto ends = at::full({count, 2}, -kInfinity, at::kDouble);  // -min, max
  for (int64_t i = 0; i < count; i++) {
    values.push_back(counted_values(tensors[which[static_cast<size_t>(i)]]));
    if (values.back().numel() == 0) continue;
    ends[i][0] = -values.back().min().item<double>();
    ends[i][1] = values.back().max().item<double>();
  }
  ends = ends.to(device);
  reduce_over(mesh, ends, ReduceOp::Max);
  ends = ends.cpu();
  auto sums = at::zeros({count, kSums + kBuckets}, at::kDouble);
  for (int64_t i = 0; i < count; i++) {
    const auto& x = values[static_cast<size_t>(i)];
    if (x.numel() == 0) continue;
    sums[i][0] = static_cast<double>(x.numel());
    sums[i][1] = x.to(at::kDouble).sum().item<double>();
    sums[i][2] = x.to(at::kDouble).square().sum().item<double>();
    const double min = -ends[i][0].item<double>(), max = ends[i][1].item<double>();
    if (min < max)
      sums[i].narrow(0, kSums, kBuckets).copy_(at::histc(x, kBuckets, min, max));
    else
      sums[i][kSums] = static_cast<double>(x.numel());
  }
  sums = sums.to(device);
  reduce_over(mesh, sums, ReduceOp::Sum);
  sums = sums.cpu();
  for (int64_t i = 0; i < count; i++) {
    const double* row = sums.data_ptr<double>() + i * (kSums + kBuckets);
    if (row[0] == 0) continue;  // no finite value
    auto& histogram = all[which[static_cast<size_t>(i)]];
    histogram.min = -ends[i][0].item<double>();
    histogram.max = ends[i][1].item<double>();
    histogram.num = row[0], histogram.sum = row[1], histogram.sum_squares = row[2];
    const int64_t buckets = histogram.min < histogram.max ? kBuckets : 1;
    for (int64_t b = 0; b < buckets; b++) {
      const double part = static_cast<double>(b + 1) / static_cast<double>(buckets);
      histogram.limits.push_back(b + 1 == buckets ? histogram.max
                                                  : histogram.min + (histogram.max - histogram.min) * part);
      histogram.counts.push_back(row[kSums + b]);
    }
  }
}

}  // namespace

std::vector<Histogram> histograms_of(const std::vector<at::Tensor>& given) {
  const at::NoGradGuard no_grad;
  std::vector<Histogram> all(given.size());
  std::vector<at::Tensor> tensors;
  std::vector<std::pair<DeviceMesh, std::vector<size_t>>> by_mesh;
  for (size_t i = 0; i < given.size(); i++) {
    tensors.push_back(without_partial(given[i]));
    const auto mesh = is_dtensor(tensors[i]) ? DTensor(tensors[i]).device_mesh() : DeviceMesh();
    auto found = std::find_if(by_mesh.begin(), by_mesh.end(), [&](const auto& each) {
      return static_cast<bool>(each.first) == static_cast<bool>(mesh) && (!mesh || each.first == mesh);
    });
    if (found == by_mesh.end()) found = by_mesh.insert(by_mesh.end(), {mesh, {}});
    found->second.push_back(i);
  }
  for (const auto& [mesh, which] : by_mesh) add_histograms(mesh, tensors, which, all);
  return all;
}

NamedHistograms histograms_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  NamedHistograms named;
  for (const auto& item : module.named_parameters()) {
    const auto& p = item.value();
    if (!at::isFloatingType(p.scalar_type())) continue;
    tensors.push_back(p);
    named.push_back({"weights/" + item.key(), {}});
    if (!p.grad().defined() || p.grad().layout() != c10::kStrided) continue;
    tensors.push_back(p.grad());
    named.push_back({"gradients/" + item.key(), {}});
  }
  const auto all = histograms_of(tensors);
  for (size_t i = 0; i < all.size(); i++) named[i].second = all[i];
  return named;
}

}  // namespace tessera::train
