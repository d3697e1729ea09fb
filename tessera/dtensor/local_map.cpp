#include "tessera/dtensor/local_map.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/autograd_functions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <set>

namespace tessera::detail {

LocalMapCall::LocalMapCall(const std::vector<MaybePlacements>& in, const LocalMapOptions& options, size_t num_args)
    : in_(in), options_(options), uneven_(options.uneven_results) {
  TESSERA_CHECK(in.empty() || in.size() == num_args, UsageError, "local_map: in_placements has ", in.size(),
                " entries, the call ", num_args,
                " arguments; give one entry per argument, std::nullopt for an argument that is not a DTensor");
  TESSERA_CHECK(options.in_grad_placements.empty() || options.in_grad_placements.size() == num_args, UsageError,
                "local_map: in_grad_placements has ", options.in_grad_placements.size(), " entries, the call ",
                num_args,
                " arguments; give one entry per argument, std::nullopt for the placements of the argument itself");
}

at::Tensor LocalMapCall::take(const at::Tensor& arg) {
  const size_t i = next_arg_++;
  const auto* given = !in_.empty() && in_[i] ? &*in_[i] : nullptr;
  if (!is_dtensor(arg)) {
    TESSERA_CHECK(!given || !arg.defined(), UsageError, "local_map: in_placements has ", to_string(*given),
                  " for argument ", i, ", which is a plain tensor of sizes ", arg.sizes(),
                  "; distribute it, or write std::nullopt for it");
    return arg;
  }
  DTensor t(arg);
  TESSERA_CHECK(in_.empty() || given, UsageError, "local_map: argument ", i, " is ", t.spec().describe(),
                ", but in_placements has std::nullopt for it; write ", to_string(t.placements()),
                ", or what the function expects");
  TESSERA_CHECK(!mesh_ || mesh_ == t.device_mesh(), UsageError, "local_map: argument ", i, " is on mesh(",
                t.device_mesh(), "), an earlier one on mesh(", mesh_, "); all must be on one mesh");
  if (!mesh_) mesh_ = t.device_mesh();
  if (given) {
    TESSERA_CHECK(given->size() == t.placements().size(), UsageError, "local_map: in_placements has ",
                  to_string(*given), " for argument ", i, ", ", t.spec().describe(),
                  "; write one placement for each of the ", mesh_.ndim(), " mesh axes");
    const auto wanted = normalize(*given, t.dim());
    if (PlacementsRef(wanted) != t.placements()) {
      TESSERA_CHECK(options_.redistribute_inputs, UsageError, "local_map: argument ", i, " is ", t.spec().describe(),
                    ", but in_placements has ", to_string(wanted),
                    "; redistribute it, or write {.redistribute_inputs = true}");
      t = t.redistribute(wanted);
    }
  }
  const auto& spec = t.spec();
  for (int64_t d = 0; d < t.dim(); d++) uneven_ |= !is_even(spec.placements, mesh_.shape(), d, spec.sizes[d]);
  const auto& grads = options_.in_grad_placements;
  return !grads.empty() && grads[i] ? t.to_local(*grads[i]) : t.to_local();
}

namespace {

Placements checked_out_placements(const Placements& placements, const DeviceMesh& mesh, const at::Tensor& local,
                                  size_t i) {
  TESSERA_CHECK(local.defined() && !is_dtensor(local), UsageError, "local_map: result ", i,
                " should be the local tensor, which is plain; ",
                local.defined() ? "it is a DTensor" : "it is undefined");
  TESSERA_CHECK(static_cast<int64_t>(placements.size()) == mesh.ndim(), UsageError, "local_map: out_placements has ",
                to_string(placements), " for result ", i, ", and mesh(", mesh, ") has ", mesh.ndim(),
                " axes; write one placement per axis");
  return normalize(placements, local.dim());
}

}  // namespace

// The global sizes if every rank has a local tensor of these sizes.
Sizes LocalMapCall::global_sizes(const at::Tensor& local, PlacementsRef placements) const {
  Sizes sizes(local.sizes().begin(), local.sizes().end());
  for (int64_t a = 0; a < mesh_.ndim(); a++)
    if (placements[a].is_sharded()) sizes[placements[a].dim] *= mesh_.shape()[a];
  return sizes;
}

// All-gathers the local sizes of all results along the axes that shard a result. Each rank checks the sizes of every
// rank, so that either all ranks continue or all throw. Returns the global sizes of each result.
std::vector<Sizes> LocalMapCall::exchange_sizes(c10::ArrayRef<at::Tensor*> results,
                                                const std::vector<MaybePlacements>& out) const {
  std::set<int64_t> sharding_axes;
  std::vector<int64_t> local_numbers;
  std::vector<Sizes> global;
  for (size_t i = 0; i < results.size(); i++) {
    global.emplace_back(results[i]->sizes().begin(), results[i]->sizes().end());
    if (!out[i]) continue;
    for (int64_t a = 0; a < mesh_.ndim(); a++)
      if ((*out[i])[a].is_sharded()) sharding_axes.insert(a);
    local_numbers.insert(local_numbers.end(), results[i]->sizes().begin(), results[i]->sizes().end());
  }
  if (sharding_axes.empty()) return global;
  const auto group = mesh_.state()->joint_group(std::vector<int64_t>(sharding_axes.begin(), sharding_axes.end()));
  const auto width = static_cast<int64_t>(local_numbers.size());
  const auto mine = at::tensor(local_numbers, at::kLong).to(mesh_.device_type());
  auto all = at::empty({group->size() * width}, mine.options());
  group->all_gather_into_tensor(all, mine).wait();
  all = all.cpu();

  int64_t column = 0;
  for (size_t i = 0; i < results.size(); i++) {
    if (!out[i]) continue;
    const auto& placements = *out[i];
    const auto ndim = results[i]->dim();
    auto sizes_of = [&](int64_t member) {
      return c10::IntArrayRef(all.const_data_ptr<int64_t>() + member * width + column, ndim);
    };
    auto coordinate_of = [&](int64_t member) {
      const auto& ranks = mesh_.ranks();
      auto position = std::find(ranks.begin(), ranks.end(), group->ranks()[member]) - ranks.begin();
      std::vector<int64_t> coordinate(mesh_.ndim());
      for (int64_t a = mesh_.ndim() - 1; a >= 0; a--) {
        coordinate[a] = position % mesh_.shape()[a];
        position /= mesh_.shape()[a];
      }
      return coordinate;
    };
    // The global size of a dim is the sum over the axes that shard it, at this rank's coordinate on the other axes.
    for (int64_t d = 0; d < ndim; d++) {
      int64_t extent = 0;
      for (int64_t m = 0; m < group->size(); m++) {
        const auto coordinate = coordinate_of(m);
        bool along = true;
        for (int64_t a = 0; a < mesh_.ndim(); a++)
          along &= placements[a].is_sharded(d) || coordinate[a] == mesh_.state()->coordinate[a];
        if (along) extent += sizes_of(m)[d];
      }
      global[i][d] = extent;
    }
    for (int64_t m = 0; m < group->size(); m++) {
      const auto expected = local_sizes(placements, mesh_.shape(), coordinate_of(m), global[i]);
      TESSERA_CHECK(
          sizes_of(m) == c10::IntArrayRef(expected), UsageError, "local_map: result ", i, " has out_placements ",
          to_string(placements), " on mesh(", mesh_, "), and its local tensors add up to sizes ",
          c10::IntArrayRef(global[i]), "; so rank ", group->ranks()[m], " should have local sizes ",
          c10::IntArrayRef(expected), ", but the function returned ", sizes_of(m),
          ". Write the placements that the results have (Shard(dim, block) if each index became a block), or pass "
          "inputs that are sharded evenly.");
    }
    column += ndim;
  }
  return global;
}

void LocalMapCall::wrap(c10::ArrayRef<at::Tensor*> results, const std::vector<MaybePlacements>& out) {
  TESSERA_CHECK(results.size() == out.size(), UsageError, "local_map: the function gave ", results.size(),
                " tensors, out_placements has ", out.size(),
                " entries; give one entry per tensor, std::nullopt for those that stay plain");
  if (!mesh_) return;
  std::vector<MaybePlacements> placements(out.size());
  for (size_t i = 0; i < out.size(); i++)
    if (out[i]) placements[i] = checked_out_placements(*out[i], mesh_, *results[i], i);
  std::vector<Sizes> uneven_sizes;
  if (uneven_) uneven_sizes = exchange_sizes(results, placements);
  for (size_t i = 0; i < out.size(); i++) {
    if (!placements[i]) continue;
    auto local = *results[i];
    Sizes sizes, strides;
    if (uneven_) {
      // Strides must be the same on every rank. A local tensor with few or no elements may have other strides.
      local = local.contiguous();
      sizes = uneven_sizes[i];
      strides = tessera::contiguous_strides(sizes);
    } else {
      sizes = global_sizes(local, *placements[i]);
      strides =
          local.is_contiguous() ? tessera::contiguous_strides(sizes) : strides_in_order_of(sizes, local.strides());
    }
    *results[i] = from_local(local, intern(mesh_, *placements[i], sizes, strides, local.scalar_type(), local.device()));
  }
}

}  // namespace tessera::detail
