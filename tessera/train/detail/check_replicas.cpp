#include "tessera/train/detail/check_replicas.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::train {
namespace {

struct LocalParameter {
  std::string name;
  at::Tensor local;
  DeviceMesh mesh;  // empty: a plain tensor
  std::vector<Placement> placements;

  bool is_replicated_along(const std::string& axis) const {
    if (!mesh) return axis != "edp";
    const auto& names = mesh.names();
    const bool is_expert = std::find(names.begin(), names.end(), "ep") != names.end();
    if (is_expert) return axis == "edp" || axis == "tp";
    const auto at = std::find(names.begin(), names.end(), axis);
    return axis != "edp" && (at == names.end() || placements[static_cast<size_t>(at - names.begin())].is_replicate());
  }
};

std::vector<LocalParameter> local_parameters(const ParallelModel& model) {
  std::vector<LocalParameter> parameters;
  for (const auto& [name, parameter] : model.parameters()) {
    const auto p = parameter.detach();
    if (!is_dtensor(p)) {
      parameters.push_back({name, p, {}, {}});
      continue;
    }
    const DTensor d(p);
    parameters.push_back({name, d.to_local(), d.device_mesh(), {d.placements().begin(), d.placements().end()}});
  }
  return parameters;
}

// Sums the bits as integers, so that rounding hides no difference. The weights depend on the position, so that swapped
// elements change the sum. Integer overflow wraps around in the same way on every rank.
at::Tensor checksum(const at::Tensor& t) {
  const auto bits = t.contiguous().view(at::kByte).flatten();
  const auto words = bits.numel() % 4 == 0 ? bits.view(at::kInt).to(at::kLong) : bits.to(at::kLong);
  const auto positions = at::arange(1, words.numel() + 1, words.options());
  return words.mul(positions.mul(2).add(1)).sum();
}

// Parameters that differ along one axis.
struct ReplicaDifference {
  int64_t count = 0;
  std::string text = {};
};

ReplicaDifference compare_along(const DeviceMesh& mesh, const std::string& axis,
                                const std::vector<LocalParameter>& parameters, std::vector<at::Tensor>& checksums) {
  std::vector<const LocalParameter*> compared;
  std::vector<at::Tensor> compared_checksums;
  for (size_t i = 0; i < parameters.size(); i++) {
    if (!parameters[i].is_replicated_along(axis)) continue;
    if (!checksums[i].defined()) checksums[i] = checksum(parameters[i].local);
    compared.push_back(&parameters[i]);
    compared_checksums.push_back(checksums[i]);
  }
  if (compared.empty()) return {};
  auto min = at::stack(compared_checksums), max = min.clone();
  const auto group = mesh.get_group(axis);
  group->all_reduce(min, ReduceOp::Min).wait();
  group->all_reduce(max, ReduceOp::Max).wait();
  const auto differ = min.ne(max).cpu();
  ReplicaDifference found;
  std::string names;
  for (size_t k = 0; k < compared.size(); k++)
    if (differ[static_cast<int64_t>(k)].item<bool>() && found.count++ < 4) names += " " + compared[k]->name;
  if (found.count > 0)
    found.text = c10::str(found.count, " of ", compared.size(), " replicated parameters differ between ranks of axis '",
                          axis, "':", names, found.count > 4 ? " ..." : "");
  return found;
}

}  // namespace

void check_replicas(const ParallelModel& model, const std::string& when) {
  const at::NoGradGuard no_grad;
  const auto parameters = local_parameters(model);
  std::vector<at::Tensor> checksums(parameters.size());
  std::string found;
  auto any = at::zeros({1}, at::TensorOptions(at::kLong).device(parameters.at(0).local.device()));
  const auto compare = [&](const DeviceMesh& mesh, const std::string& axis) {
    const auto difference = compare_along(mesh, axis, parameters, checksums);
    any += difference.count;
    if (found.empty()) found = difference.text;
  };
  const auto& mesh = model.mesh();
  for (const auto& axis : mesh.names())
    if (mesh.size(axis) > 1 && axis != "pp") compare(mesh, axis);
  if (model.expert_mesh() && model.expert_mesh().size("edp") > 1) compare(model.expert_mesh(), "edp");
  // All ranks throw together, also those whose own axes show no difference.
  for (const auto& axis : mesh.names())
    if (mesh.size(axis) > 1) mesh.get_group(axis)->all_reduce(any, ReduceOp::Max).wait();
  TESSERA_CHECK(any.item<int64_t>() == 0, CommError, when, ": ",
                found.empty() ? "replicated parameters differ between other ranks" : found);
}

}  // namespace tessera::train
