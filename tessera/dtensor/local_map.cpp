#include "tessera/dtensor/local_map.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/edges.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <set>

namespace tessera::detail {

LocalMapCall::LocalMapCall(const std::vector<MaybePlacements>& in, const LocalMapOptions& options, size_t num_args)
    : in_(in), options_(options), uneven_(options.uneven_results) {
  TESSERA_CHECK(in.empty() || in.size() == num_args, UsageError, "local_map: in_placements has ", in.size(),
                " entries, the call ", num_args,
                " arguments; give one an argument, std::nullopt for what is no distributed tensor");
  TESSERA_CHECK(options.in_grad_placements.empty() || options.in_grad_placements.size() == num_args, UsageError,
                "local_map: in_grad_placements has ", options.in_grad_placements.size(), " entries, the call ",
                num_args, " arguments; give one an argument, std::nullopt for those whose gradient lies as they do");
}

at::Tensor LocalMapCall::take(const at::Tensor& arg) {
  const size_t i = next_arg_++;
  const auto* asked = !in_.empty() && in_[i] ? &*in_[i] : nullptr;
  if (!is_dtensor(arg)) {
    TESSERA_CHECK(!asked || !arg.defined(), UsageError, "local_map: in_placements say ", to_string(*asked),
                  " for argument ", i, ", which is a plain tensor of sizes ", arg.sizes(),
                  "; distribute it, or write std::nullopt for it");
    return arg;
  }
  DTensor t(arg);
  TESSERA_CHECK(in_.empty() || asked, UsageError, "local_map: argument ", i, " is ", t.spec().describe(),
                ", and in_placements say std::nullopt for it; write ", to_string(t.placements()),
                ", or what the function expects");
  TESSERA_CHECK(!mesh_ || mesh_ == t.device_mesh(), UsageError, "local_map: argument ", i, " lies on mesh(",
                t.device_mesh(), "), an earlier one on mesh(", mesh_, "); all must lie on one");
  if (!mesh_) mesh_ = t.device_mesh();
  if (asked) {
    TESSERA_CHECK(asked->size() == t.placements().size(), UsageError, "local_map: in_placements say ",
                  to_string(*asked), " for argument ", i, ", ", t.spec().describe(), "; write one for each of the ",
                  mesh_.ndim(), " mesh axes");
    const auto wanted = normalize(*asked, t.dim());
    if (PlacementsRef(wanted) != t.placements()) {
      TESSERA_CHECK(options_.redistribute_inputs, UsageError, "local_map: argument ", i, " is ", t.spec().describe(),
                    ", in_placements say ", to_string(wanted),
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

Placements checked(const Placements& placements, const DeviceMesh& mesh, const at::Tensor& piece, size_t i) {
  TESSERA_CHECK(piece.defined() && !is_dtensor(piece), UsageError, "local_map: result ", i,
                " should be this rank's piece, a plain tensor; ",
                piece.defined() ? "it is a distributed one" : "it is undefined");
  TESSERA_CHECK(static_cast<int64_t>(placements.size()) == mesh.ndim(), UsageError, "local_map: out_placements say ",
                to_string(placements), " for result ", i, ", and mesh(", mesh, ") has ", mesh.ndim(),
                " axes; write one for each");
  return normalize(placements, piece.dim());
}

}  // namespace

// Every rank has a piece of this size.
Sizes LocalMapCall::global_sizes(const at::Tensor& piece, PlacementsRef placements) const {
  Sizes sizes(piece.sizes().begin(), piece.sizes().end());
  for (int64_t a = 0; a < mesh_.ndim(); a++)
    if (placements[a].is_sharded()) sizes[placements[a].dim] *= mesh_.shape()[a];
  return sizes;
}

// All ranks along the axes that cut some result tell the sizes of their pieces, all results at once. Each rank then
// checks every piece, not only its own, so that either all go on or all throw.
std::vector<Sizes> LocalMapCall::exchange_sizes(c10::ArrayRef<at::Tensor*> results,
                                                const std::vector<MaybePlacements>& out) const {
  std::set<int64_t> cutting;
  std::vector<int64_t> told;
  std::vector<Sizes> global;
  for (size_t i = 0; i < results.size(); i++) {
    global.emplace_back(results[i]->sizes().begin(), results[i]->sizes().end());
    if (!out[i]) continue;
    for (int64_t a = 0; a < mesh_.ndim(); a++)
      if ((*out[i])[a].is_sharded()) cutting.insert(a);
    told.insert(told.end(), results[i]->sizes().begin(), results[i]->sizes().end());
  }
  if (cutting.empty()) return global;
  const auto group = mesh_.state()->joint_group(std::vector<int64_t>(cutting.begin(), cutting.end()));
  const auto width = static_cast<int64_t>(told.size());
  const auto mine = at::tensor(told, at::kLong).to(mesh_.device_type());
  auto all = at::empty({group->size() * width}, mine.options());
  group->all_gather_into_tensor(all, mine).wait();
  all = all.cpu();

  int64_t column = 0;
  for (size_t i = 0; i < results.size(); i++) {
    if (!out[i]) continue;
    const auto& placements = *out[i];
    const auto ndim = results[i]->dim();
    auto said = [&](int64_t member) {
      return c10::IntArrayRef(all.const_data_ptr<int64_t>() + member * width + column, ndim);
    };
    auto coordinate_of = [&](int64_t member) {
      const auto& ranks = mesh_.ranks();
      auto place = std::find(ranks.begin(), ranks.end(), group->ranks()[member]) - ranks.begin();
      std::vector<int64_t> coordinate(mesh_.ndim());
      for (int64_t a = mesh_.ndim() - 1; a >= 0; a--) {
        coordinate[a] = place % mesh_.shape()[a];
        place /= mesh_.shape()[a];
      }
      return coordinate;
    };
    // The extent of a dim is the sum over the axes that cut it, at this rank's place on the others.
    for (int64_t d = 0; d < ndim; d++) {
      int64_t extent = 0;
      for (int64_t m = 0; m < group->size(); m++) {
        const auto coordinate = coordinate_of(m);
        bool along = true;
        for (int64_t a = 0; a < mesh_.ndim(); a++)
          along &= placements[a].is_sharded(d) || coordinate[a] == mesh_.state()->coordinate[a];
        if (along) extent += said(m)[d];
      }
      global[i][d] = extent;
    }
    for (int64_t m = 0; m < group->size(); m++) {
      const auto expected = local_sizes(placements, mesh_.shape(), coordinate_of(m), global[i]);
      TESSERA_CHECK(
          said(m) == c10::IntArrayRef(expected), UsageError, "local_map: result ", i, " is said to be ",
          to_string(placements), " on mesh(", mesh_, ") and its pieces make up sizes ", c10::IntArrayRef(global[i]),
          "; of those rank ", group->ranks()[m], " should have a piece ", c10::IntArrayRef(expected),
          ", and the function gave it ", said(m),
          ". Write the placement that the pieces have (Shard(dim, block) if each index became a block of them), or "
          "give the function evenly cut inputs.");
    }
    column += ndim;
  }
  return global;
}

void LocalMapCall::wrap(c10::ArrayRef<at::Tensor*> results, const std::vector<MaybePlacements>& out) {
  TESSERA_CHECK(results.size() == out.size(), UsageError, "local_map: the function gave ", results.size(),
                " tensors, out_placements has ", out.size(),
                " entries; give one a tensor, std::nullopt for those that stay plain");
  if (!mesh_) return;
  std::vector<MaybePlacements> placements(out.size());
  for (size_t i = 0; i < out.size(); i++)
    if (out[i]) placements[i] = checked(*out[i], mesh_, *results[i], i);
  std::vector<Sizes> uneven_sizes;
  if (uneven_) uneven_sizes = exchange_sizes(results, placements);
  for (size_t i = 0; i < out.size(); i++) {
    if (!placements[i]) continue;
    auto piece = *results[i];
    Sizes sizes, strides;
    if (uneven_) {
      // Strides must be the same on every rank, and those of a short or empty piece say little.
      piece = piece.contiguous();
      sizes = uneven_sizes[i];
      strides = tessera::contiguous_strides(sizes);
    } else {
      sizes = global_sizes(piece, *placements[i]);
      strides =
          piece.is_contiguous() ? tessera::contiguous_strides(sizes) : strides_in_order_of(sizes, piece.strides());
    }
    *results[i] = from_local(piece, intern(mesh_, *placements[i], sizes, strides, piece.scalar_type(), piece.device()));
  }
}

}  // namespace tessera::detail
