#include "tessera/checkpoint/detail/local_boxes.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"

namespace tessera::dcp {
namespace {

// The boxes of all combinations of one index range per dim, the last dim fastest.
template <class Ranges>
std::vector<LocalBoxes::Part> parts_of(const std::vector<Ranges>& ranges_by_dim) {
  std::vector<LocalBoxes::Part> parts(1);
  for (const auto& ranges : ranges_by_dim) {
    std::vector<LocalBoxes::Part> next_parts;
    for (const auto& part : parts) {
      int64_t at = 0;
      for (const auto& range : ranges) {
        auto next = part;
        next.box.offsets.push_back(range.begin);
        next.box.sizes.push_back(range.end - range.begin);
        next.at.push_back(at);
        at += range.end - range.begin;
        next_parts.push_back(std::move(next));
      }
    }
    parts = std::move(next_parts);
  }
  return parts;
}

}  // namespace

std::vector<Box> LocalBoxes::boxes() const {
  std::vector<Box> boxes;
  for (const auto& part : parts) boxes.push_back(part.box);
  return boxes;
}

at::Tensor LocalBoxes::view(const Part& part, const Box& box) const {
  if (box.numel() == 0) return local.new_empty(box.sizes);  // an empty local tensor may have other sizes
  auto view = local;
  for (size_t d = 0; d < box.sizes.size(); d++)
    view = view.narrow(static_cast<int64_t>(d), part.at[d] + box.offsets[d] - part.box.offsets[d], box.sizes[d]);
  return view;
}

LocalBoxes local_boxes(const std::string& name, const at::Tensor& tensor) {
  TESSERA_CHECK(!tensor.is_meta(), UsageError, "'", name, "' ", tensor.sizes(),
                " is on the meta device and has no data; materialize the module first");
  LocalBoxes boxes{.local = tensor.detach(), .sizes = Sizes(tensor.sizes().begin(), tensor.sizes().end()), .parts = {}};
  const TensorSpec* spec = is_dtensor(tensor) ? &DTensor(tensor).spec() : nullptr;
  if (spec) {
    TESSERA_CHECK(!spec->has_partial(), UsageError, "'", name, "' is ", spec->describe(),
                  "; a Partial tensor cannot be saved or loaded: redistribute it first");
    boxes.local = detail::local_of(tensor).detach();
  }
  if (tensor.numel() == 0) {
    boxes.parts.push_back({Box::full(tensor.sizes()), Sizes(tensor.sizes().size(), 0)});
    return boxes;
  }
  if (spec && !spec->mesh.get_coordinate()) return boxes;  // this rank is not in the mesh
  using Ranges = decltype(spec->local_ranges(0));
  std::vector<Ranges> ranges;
  for (int64_t d = 0; d < tensor.dim(); d++)
    ranges.push_back(spec ? spec->local_ranges(d) : Ranges{{0, tensor.size(d)}});
  boxes.parts = parts_of(ranges);
  return boxes;
}

}  // namespace tessera::dcp
