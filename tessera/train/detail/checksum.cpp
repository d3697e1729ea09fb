#include "tessera/train/detail/checksum.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::train {
namespace {

struct Piece {
  std::string name;
  at::Tensor local;
  DeviceMesh mesh;  // none: plain
  std::vector<Placement> placements;

  bool same_along(const std::string& axis) const {
    if (!mesh) return true;
    const auto& names = mesh.names();
    const auto at = std::find(names.begin(), names.end(), axis);
    return at == names.end() || placements[static_cast<size_t>(at - names.begin())].is_replicate();
  }
};

std::vector<Piece> local_tensors_of(const torch::nn::Module& module) {
  std::vector<Piece> pieces;
  for (const auto& item : module.named_parameters()) {
    const auto p = item->detach();
    if (!is_dtensor(p)) {
      pieces.push_back({item.key(), p, {}, {}});
      continue;
    }
    const DTensor d(p);
    pieces.push_back({item.key(), d.to_local(), d.device_mesh(), {d.placements().begin(), d.placements().end()}});
  }
  return pieces;
}

// The bits as integers, added up, so that no rounding hides a difference, each times a number of its own place, so that
// no swap does. Integer sums wrap around, the same on every rank.
at::Tensor checksum(const at::Tensor& t) {
  const auto bits = t.contiguous().view(at::kByte).flatten();
  const int64_t rest = bits.numel() % 4;
  const auto words = rest == 0 ? bits.view(at::kInt).to(at::kLong) : bits.to(at::kLong);
  const auto places = at::arange(1, words.numel() + 1, words.options());
  return words.mul(places.mul(2).add(1)).sum();
}

// How many of `compared` differ along an axis, and the first names.
struct Difference {
  int64_t count = 0;
  std::string text = {};
};

Difference compare_along(const DeviceMesh& mesh, const std::string& axis, const std::vector<Piece>& pieces,
                         std::vector<at::Tensor>& sums) {
  std::vector<const Piece*> compared;
  std::vector<at::Tensor> rows;
  for (size_t i = 0; i < pieces.size(); i++) {
    if (!pieces[i].same_along(axis)) continue;
    if (!sums[i].defined()) sums[i] = checksum(pieces[i].local);
    compared.push_back(&pieces[i]);
    rows.push_back(sums[i]);
  }
  if (compared.empty()) return {};
  auto least = at::stack(rows), greatest = least.clone();
  const auto group = mesh.get_group(axis);
  group->all_reduce(least, ReduceOp::Min).wait();
  group->all_reduce(greatest, ReduceOp::Max).wait();
  const auto differ = least.ne(greatest).cpu();
  Difference found;
  std::string names;
  for (size_t k = 0; k < compared.size(); k++)
    if (differ[static_cast<int64_t>(k)].item<bool>() && found.count++ < 4) names += " " + compared[k]->name;
  if (found.count > 0)
    found.text =
        c10::str(found.count, " of ", compared.size(), " parameters that should be the same on all ranks of axis '",
                 axis, "' are not:", names, found.count > 4 ? " ..." : "");
  return found;
}

}  // namespace

void check_replicas(const torch::nn::Module& module, const DeviceMesh& mesh, const std::string& when) {
  const at::NoGradGuard no_grad;
  const auto pieces = local_tensors_of(module);
  std::vector<at::Tensor> sums(pieces.size());
  std::string found;
  auto any = at::zeros({1}, at::TensorOptions(at::kLong).device(pieces.at(0).local.device()));
  for (const auto& axis : mesh.names()) {
    if (mesh.size(axis) == 1) continue;
    const auto difference = compare_along(mesh, axis, pieces, sums);
    any += difference.count;
    if (found.empty()) found = difference.text;
  }
  // All ranks end together, also those that see no difference along their own axes.
  for (const auto& axis : mesh.names())
    if (mesh.size(axis) > 1) mesh.get_group(axis)->all_reduce(any, ReduceOp::Max).wait();
  TESSERA_CHECK(any.item<int64_t>() == 0, CommError, when, ", ranks have drifted apart: ",
                found.empty() ? "parameters of other ranks differ that should be the same" : found);
}

}  // namespace tessera::train
