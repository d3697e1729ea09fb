#include "tessera/rules/detail/view_map.h"

#include <algorithm>

namespace tessera::rules {
namespace {

using OutPlacements = std::vector<std::optional<Placement>>;

// The elements of `dims` that the rank at `coordinate` has, numbered in row-major order over those dims, as ranges.
std::vector<IndexRange> held_elements(PlacementsRef placements, c10::IntArrayRef mesh_shape,
                                      c10::IntArrayRef coordinate, c10::IntArrayRef sizes,
                                      c10::ArrayRef<int64_t> dims) {
  std::vector<IndexRange> held = {{0, 1}};
  for (auto d : dims) {
    auto ranges = local_ranges(placements, mesh_shape, coordinate, d, sizes[d]);
    std::vector<IndexRange> next;
    bool full = ranges.size() == 1 && ranges[0] == IndexRange{0, sizes[d]};
    if (full) {
      for (auto outer : held) next.push_back({outer.begin * sizes[d], outer.end * sizes[d]});
    } else {
      for (auto outer : held)
        for (auto i = outer.begin; i < outer.end; i++)
          for (const auto& range : ranges) append_range(next, {i * sizes[d] + range.begin, i * sizes[d] + range.end});
    }
    held = std::move(next);
  }
  return held;
}

// The dims whose size is not 1.
std::vector<int64_t> longer_than_one(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> dims) {
  std::vector<int64_t> result;
  for (auto d : dims)
    if (sizes[d] != 1) result.push_back(d);
  return result;
}

// One group, and the mesh axes that shard it.
class GroupFollower {
 public:
  GroupFollower(const ViewMap& map, const ViewMap::Group& group, PlacementsRef in, c10::IntArrayRef mesh_shape)
      : map_(map), group_(group), mesh_shape_(mesh_shape), in_(in.size(), Replicate()), out_(in.size(), Replicate()) {
    for (size_t axis = 0; axis < in.size(); axis++)
      if (in[axis].is_sharded() && std::find(group.in.begin(), group.in.end(), in[axis].dim) != group.in.end())
        axes_.push_back(axis);
    given_.assign(in.begin(), in.end());
  }

  // Writes the output placements of the axes that shard this group. Keeps as many axes sharded as possible, earlier
  // axes first.
  void write_placements(OutPlacements& result) {
    if (axes_.empty()) return;
    size_t subsets = size_t{1} << axes_.size();
    for (size_t dropped = 0; dropped < subsets; dropped++) {  // bit i: the i-th axis, counted from the last
      for (auto axis : axes_) in_[axis] = out_[axis] = Replicate();
      kept_.clear();
      for (size_t i = 0; i < axes_.size(); i++)
        if (!(dropped >> (axes_.size() - 1 - i) & 1)) kept_.push_back(axes_[i]);
      for (auto axis : kept_) in_[axis] = given_[axis];
      if (!place(0)) continue;
      for (auto axis : axes_)
        result[axis] = in_[axis].is_sharded()   ? std::optional(out_[axis])
                       : mesh_shape_[axis] == 1 ? std::optional(Replicate())  // one rank: no gather is needed
                                                : std::nullopt;
      return;
    }
  }

 private:
  bool place(size_t i) {
    if (i == kept_.size()) return same_elements();
    auto axis = kept_[i];
    for (const auto& candidate : candidates(axis)) {
      out_[axis] = candidate;
      if (place(i + 1)) return true;
    }
    out_[axis] = Replicate();
    return false;
  }

  // Output placements that may give each rank the elements that `given_[axis]` gives it of the input. Sizes are those
  // of rank 0 after the axes before this one. same_elements() verifies each candidate.
  std::vector<Placement> candidates(size_t axis) const {
    const auto& shard = given_[axis];
    int64_t outer = 1, inner = 1, extent = 1;
    bool passed = false;
    for (auto d : group_.in) {
      int64_t e = extent_before(in_, axis, d, map_.in_sizes[d]);
      if (d == shard.dim) {
        extent = e;
        passed = true;
      } else {
        (passed ? inner : outer) *= e;
      }
    }
    std::vector<Placement> result;
    auto from = longer_than_one(map_.in_sizes, group_.in), to = longer_than_one(map_.out_sizes, group_.out);
    if (from.size() == 1 && to.size() == 1 && shard.dim == from[0]) result.push_back(shard.with_dim(to[0]));
    int64_t out_outer = 1;
    for (size_t o = 0; o < group_.out.size(); o++) {
      int64_t dim = group_.out[o], own = extent_before(out_, axis, dim, map_.out_sizes[dim]), out_inner = 1;
      for (size_t j = o + 1; j < group_.out.size(); j++)
        out_inner *= extent_before(out_, axis, group_.out[j], map_.out_sizes[group_.out[j]]);
      if (own != 1 || extent == 1) {
        auto add = [&](Placement p) {
          if (std::find(result.begin(), result.end(), p) == result.end()) result.push_back(p);
        };
        add(Shard(dim));
        if (shard.is_shard()) {
          int64_t n = mesh_shape_[axis], blocks = (extent + shard.factor - 1) / shard.factor;
          int64_t chunk = (blocks + n - 1) / n * shard.factor;  // size of each shard but the last ones
          for (int64_t unit : {shard.factor * inner, chunk * inner})
            if (out_inner > 0 && unit % out_inner == 0 && unit / out_inner > 1) add(Shard(dim, unit / out_inner));
        }
        int64_t parts = outer * (shard.is_shard() ? 1 : shard.factor);
        if (out_outer > 0 && parts % out_outer == 0 && parts / out_outer > 1) add(StridedShard(dim, parts / out_outer));
      }
      out_outer *= own;
    }
    return result;
  }

  int64_t extent_before(PlacementsRef placements, size_t axis, int64_t d, int64_t size) const {
    std::vector<int64_t> first(mesh_shape_.size(), 0);
    return extent_after(placements, mesh_shape_, first, d, size, static_cast<int64_t>(axis));
  }

  bool same_elements() const {
    std::vector<int64_t> coordinate(mesh_shape_.size(), 0);
    while (true) {
      if (held_elements(in_, mesh_shape_, coordinate, map_.in_sizes, group_.in) !=
          held_elements(out_, mesh_shape_, coordinate, map_.out_sizes, group_.out))
        return false;
      size_t i = 0;  // go to the next coordinate of the kept axes
      while (i < kept_.size() && ++coordinate[kept_[i]] == mesh_shape_[kept_[i]]) coordinate[kept_[i++]] = 0;
      if (i == kept_.size()) return true;
    }
  }

  const ViewMap& map_;
  const ViewMap::Group& group_;
  c10::IntArrayRef mesh_shape_;
  Placements given_, in_, out_;
  std::vector<size_t> axes_, kept_;
};

}  // namespace

OutPlacements DimMap::follow(PlacementsRef in, c10::IntArrayRef mesh_shape) const {
  OutPlacements result;
  for (size_t axis = 0; axis < in.size(); axis++) {
    const auto& p = in[axis];
    if (p.is_sharded() && out_dim[p.dim] >= 0)
      result.emplace_back(p.with_dim(out_dim[p.dim]));
    else if (p.is_replicate() || (p.is_partial() && keeps_partial))
      result.emplace_back(p);
    else if (mesh_shape[axis] == 1)
      result.emplace_back(Replicate());
    else
      result.emplace_back(std::nullopt);
  }
  return result;
}

ViewMap::ViewMap(c10::IntArrayRef in, c10::IntArrayRef out) : in_sizes(in), out_sizes(out) {
  size_t i = 0, o = 0;
  bool empty = std::count(in.begin(), in.end(), 0) > 0;
  if (empty) {  // products are 0, so all dims are one group
    groups.emplace_back();
    for (; i < in.size(); i++) groups[0].in.push_back(static_cast<int64_t>(i));
    for (; o < out.size(); o++) groups[0].out.push_back(static_cast<int64_t>(o));
  }
  while (i < in.size() || o < out.size()) {
    Group group;
    int64_t in_product = 1, out_product = 1;
    auto take_in = [&] {
      in_product *= in[i];
      group.in.push_back(static_cast<int64_t>(i++));
    };
    auto take_out = [&] {
      out_product *= out[o];
      group.out.push_back(static_cast<int64_t>(o++));
    };
    // A dim of size 1 joins the group that follows it.
    while (i < in.size() && in[i] == 1) take_in();
    while (o < out.size() && out[o] == 1) take_out();
    if (i < in.size()) take_in();
    if (o < out.size()) take_out();
    while (in_product != out_product) {
      bool more_in = in_product < out_product ? i < in.size() : o == out.size();
      more_in ? take_in() : take_out();
    }
    // Dims of size 1 at the end join the last group.
    bool rest_is_ones = std::all_of(in.begin() + i, in.end(), [](int64_t s) { return s == 1; }) &&
                        std::all_of(out.begin() + o, out.end(), [](int64_t s) { return s == 1; });
    if (rest_is_ones) {
      while (i < in.size()) take_in();
      while (o < out.size()) take_out();
    }
    groups.push_back(std::move(group));
  }
}

OutPlacements ViewMap::follow(PlacementsRef in, c10::IntArrayRef mesh_shape) const {
  OutPlacements result(in.begin(), in.end());  // R and Partial stay
  if (in_sizes == out_sizes) return result;
  for (const auto& group : groups) GroupFollower(*this, group, in, mesh_shape).write_placements(result);
  return result;
}

}  // namespace tessera::rules
