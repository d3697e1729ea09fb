#include "tessera/testing/detail/simulated_mesh.h"

#include "tessera/base/error.h"
#include "tessera/rules/detail/geometry.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randint_like.h>
#include <ATen/ops/real.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>

namespace tessera::testing {
namespace {

using at::Tensor;

int64_t mesh_size(c10::IntArrayRef mesh_shape) {
  int64_t ranks = 1;
  for (auto n : mesh_shape) ranks *= n;
  return ranks;
}

Tensor random_like(const Tensor& x) {  // 0.25 to 1.25, or 1 to 3
  if (x.is_complex()) return at::rand_like(x).add_(0.25);
  if (!at::isFloatingType(x.scalar_type())) return at::randint_like(x, 1, 4);
  return at::rand_like(x).add_(0.25);
}

// n random tensors whose p-norm over the ranks is x.
std::vector<Tensor> split_by_norm(const Tensor& x, double p, int64_t n) {
  std::vector<Tensor> shares;
  Tensor total;
  for (int64_t i = 0; i < n; i++) {
    shares.push_back(random_like(x));
    auto power = std::isinf(p) ? shares.back() : shares.back().pow(p);
    total = !total.defined() ? power : std::isinf(p) ? total.max(power) : total + power;
  }
  auto norm = std::isinf(p) ? total : total.pow(1 / p);
  for (auto& share : shares) share = x * share / norm;
  return shares;
}

// n random tensors whose reduction by the partial placement `p` is x.
std::vector<Tensor> split_partial(const Tensor& x, const Placement& p, int64_t n) {
  if (p.kind == Placement::Kind::NormPartial) return split_by_norm(x, p.norm, n);
  std::vector<Tensor> terms;
  auto owner = at::randint_like(x.is_complex() ? at::real(x) : x, 0, n);
  auto of_owner = [&](int64_t i) { return owner.eq(i).to(x.scalar_type()); };
  auto of_others = [&](int64_t i) { return owner.ne(i).to(x.scalar_type()); };
  auto with_rest = [&](auto combine, auto rest) {  // random values, then the rest
    Tensor so_far;
    for (int64_t i = 0; i + 1 < n; i++) {
      terms.push_back(random_like(x));
      so_far = so_far.defined() ? combine(so_far, terms.back()) : terms.back();
    }
    terms.push_back(so_far.defined() ? rest(so_far) : x.clone());
  };
  if (p.kind == Placement::Kind::MaskPartial) {
    for (int64_t i = 0; i < n; i++) terms.push_back(x * of_owner(i));
    return terms;
  }
  switch (p.op) {
    case ReduceOp::Sum:
      with_rest([](auto a, auto b) { return a + b; }, [&](auto a) { return x - a; });
      break;
    case ReduceOp::Avg:
      with_rest([](auto a, auto b) { return a + b; }, [&](auto a) { return x * n - a; });
      break;
    case ReduceOp::Product:
      with_rest([](auto a, auto b) { return a * b; }, [&](auto a) { return x / a; });
      break;
    case ReduceOp::Max:
      for (int64_t i = 0; i < n; i++) terms.push_back(x - random_like(x) * of_others(i));
      break;
    case ReduceOp::Min:
      for (int64_t i = 0; i < n; i++) terms.push_back(x + random_like(x) * of_others(i));
      break;
  }
  return terms;
}

Tensor reduced(const std::vector<Tensor>& terms, ReduceOp op) {
  auto stacked = at::stack(terms);
  switch (op) {
    case ReduceOp::Sum:
      return stacked.sum(0);
    case ReduceOp::Avg:
      return stacked.mean(0);
    case ReduceOp::Product:
      return stacked.prod(0);
    case ReduceOp::Max:
      return stacked.amax(0);
    case ReduceOp::Min:
      return stacked.amin(0);
  }
  return {};
}

// Combines the values of the ranks along one mesh axis that does not shard. Sets `problem` if they contradict.
Tensor combine(const std::vector<Tensor>& terms, const Placement& p, at::ScalarType computed_in, std::string& problem) {
  switch (p.kind) {
    case Placement::Kind::Partial:
      return reduced(terms, p.op).to(terms[0].scalar_type());
    case Placement::Kind::NormPartial: {
      auto stacked = at::stack(terms).abs();
      return std::isinf(p.norm) ? stacked.amax(0) : stacked.pow(p.norm).sum(0).pow(1 / p.norm);
    }
    case Placement::Kind::MaskPartial: {
      auto stacked = at::stack(terms);
      if (stacked.ne(0).sum(0).gt(1).any().item<bool>()) problem = "P(mask), but two ranks have the same element";
      return stacked.sum(0).to(terms[0].scalar_type());
    }
    case Placement::Kind::Replicate:
    case Placement::Kind::Shard:
    case Placement::Kind::StridedShard:
      break;
  }
  for (size_t i = 1; i < terms.size(); i++)
    if (auto why = difference(terms[0], terms[i], computed_in); !why.empty())
      problem = c10::str("R, but ranks differ: ", why);
  return terms[0];
}

Tensor indices_of(const IndexRanges& ranges) {
  std::vector<int64_t> indices;
  for (const auto& range : ranges)
    for (auto i = range.begin; i < range.end; i++) indices.push_back(i);
  return at::tensor(indices, at::kLong);
}

bool is_sharded_dim(PlacementsRef placements, int64_t d) {
  for (const auto& p : placements)
    if (p.is_sharded(d)) return true;
  return false;
}

int64_t rank_at(const std::vector<int64_t>& coordinate, c10::IntArrayRef mesh_shape) {
  int64_t rank = 0;
  for (size_t a = 0; a < mesh_shape.size(); a++) rank = rank * mesh_shape[a] + coordinate[a];
  return rank;
}

// Writes a rank's local tensor to its indices in the global tensor.
void write_local(Tensor& global, const Tensor& local, PlacementsRef placements, c10::IntArrayRef mesh_shape,
                 c10::IntArrayRef coordinate) {
  if (local.numel() == 0) return;
  if (global.dim() == 0) {
    global.copy_(local);
    return;
  }
  c10::List<std::optional<Tensor>> grid;
  for (int64_t d = 0; d < global.dim(); d++) {
    std::vector<int64_t> shape(static_cast<size_t>(global.dim()), 1);
    shape[d] = -1;
    grid.push_back(indices_of(local_ranges(placements, mesh_shape, coordinate, d, global.size(d))).view(shape));
  }
  global.index_put_(grid, local);
}

}  // namespace

std::vector<int64_t> coordinate_of(int64_t rank, c10::IntArrayRef mesh_shape) {
  std::vector<int64_t> coordinate(mesh_shape.size());
  for (size_t a = mesh_shape.size(); a-- > 0;) {
    coordinate[a] = rank % mesh_shape[a];
    rank /= mesh_shape[a];
  }
  return coordinate;
}

std::string difference(const Tensor& want, const Tensor& got, at::ScalarType computed_in) {
  if (want.sizes() != got.sizes()) return c10::str("want sizes ", want.sizes(), ", got ", got.sizes());
  if (want.scalar_type() != got.scalar_type())
    return c10::str("want type ", want.scalar_type(), ", got ", got.scalar_type());
  if (want.numel() == 0) return "";
  auto a = want.cpu().to(at::kDouble).contiguous().view({-1}), b = got.cpu().to(at::kDouble).contiguous().view({-1});
  const bool is_floating = at::isFloatingType(want.scalar_type());
  const auto dtype = is_floating && computed_in != at::ScalarType::Undefined ? computed_in : want.scalar_type();
  const double tolerance = dtype == at::kBFloat16 ? 2e-2
                           : dtype == at::kHalf   ? 4e-3
                           : dtype == at::kFloat  ? 1e-4
                                                  : 1e-6;
  const double largest = at::isReducedFloatingType(dtype) ? a.nan_to_num(0, 0, 0).abs().max().item<double>() : 1;
  const double absolute = tolerance * std::max(1.0, largest);
  if (at::allclose(a, b, tolerance, absolute, /*equal_nan=*/true)) return "";
  for (int64_t i = 0; i < a.numel(); i++)
    if (!at::allclose(a[i], b[i], tolerance, absolute, true))
      return c10::str("element ", i, " of ", want.sizes(), ": want ", a[i].item<double>(), ", got ",
                      b[i].item<double>());
  return "";
}

std::vector<Tensor> scatter(const Tensor& global, PlacementsRef placements, c10::IntArrayRef mesh_shape) {
  const bool is_float8 = at::isFloat8Type(global.scalar_type());
  if (!global.is_cpu() || is_float8) {  // index_select of float8 has no kernel
    auto locals = scatter(is_float8 ? global.cpu().view(at::kByte) : global.cpu(), placements, mesh_shape);
    for (auto& local : locals) local = (is_float8 ? local.view(global.scalar_type()) : local).to(global.device());
    return locals;
  }
  std::vector<Tensor> parts = {global};  // one per coordinate of the axes so far
  for (size_t axis = 0; axis < placements.size(); axis++) {
    std::vector<Tensor> next;
    for (const auto& part : parts) {
      auto split = placements[axis].is_partial() ? split_partial(part, placements[axis], mesh_shape[axis])
                                                 : std::vector<Tensor>(static_cast<size_t>(mesh_shape[axis]), part);
      next.insert(next.end(), split.begin(), split.end());
    }
    parts = std::move(next);
  }
  for (int64_t rank = 0; rank < mesh_size(mesh_shape); rank++) {
    auto coordinate = coordinate_of(rank, mesh_shape);
    auto shard = parts[rank];
    for (int64_t d = 0; d < global.dim(); d++)
      if (is_sharded_dim(placements, d))
        shard = shard.index_select(d, indices_of(local_ranges(placements, mesh_shape, coordinate, d, global.size(d))));
    auto local =
        at::empty_strided(shard.sizes(), rules::dense_strides(shard.sizes(), global.strides()), shard.options());
    parts[rank] = local.copy_(shard);
  }
  return parts;
}

GatherResult gather(const std::vector<Tensor>& locals, PlacementsRef placements, c10::IntArrayRef mesh_shape,
                    c10::IntArrayRef sizes, at::ScalarType computed_in) {
  if (!locals[0].is_cpu()) {
    std::vector<Tensor> copies;
    for (const auto& local : locals) copies.push_back(local.cpu());
    return gather(copies, placements, mesh_shape, sizes, computed_in);
  }
  GatherResult result;
  // First the axes that shard: for each coordinate of the other axes, write all shards into one tensor. It is stored at
  // coordinate 0 of the sharding axes.
  std::vector<Tensor> globals(locals.size());
  for (int64_t rank = 0; rank < static_cast<int64_t>(locals.size()); rank++) {
    auto coordinate = coordinate_of(rank, mesh_shape);
    auto want = local_sizes(placements, mesh_shape, coordinate, sizes);
    if (locals[rank].sizes() != c10::IntArrayRef(want)) {
      result.problem = c10::str("rank ", rank, " has sizes ", locals[rank].sizes(), "; the local tensor of ", sizes,
                                " with ", to_string(placements), " has ", c10::IntArrayRef(want));
      return result;
    }
    auto home = coordinate;
    for (size_t axis = 0; axis < placements.size(); axis++)
      if (placements[axis].is_sharded()) home[axis] = 0;
    auto& global = globals[rank_at(home, mesh_shape)];
    if (!global.defined()) global = at::zeros(sizes, locals[rank].options());
    write_local(global, locals[rank], placements, mesh_shape, coordinate);
  }
  // Then the other axes, from the last to the first.
  for (size_t axis = placements.size(); axis-- > 0;) {
    if (placements[axis].is_sharded()) continue;
    for (int64_t rank = 0; rank < static_cast<int64_t>(locals.size()); rank++) {
      auto coordinate = coordinate_of(rank, mesh_shape);
      if (!globals[rank].defined() || coordinate[axis] != 0) continue;
      std::vector<Tensor> parts;
      for (int64_t i = 0; i < mesh_shape[axis]; i++) {
        coordinate[axis] = i;
        auto& part = globals[rank_at(coordinate, mesh_shape)];
        parts.push_back(part);
        part = Tensor();
      }
      globals[rank] = combine(parts, placements[axis], computed_in, result.problem);
    }
  }
  result.global = globals[0];
  return result;
}

}  // namespace tessera::testing
