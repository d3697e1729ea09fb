#include "tessera/checkpoint/detail/local_boxes.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"

namespace tessera::dcp {
namespace {

// Boxes of all choices of one run from each dim, the last dim's fastest.
std::vector<Held::Part> parts_of(const std::vector<Runs>& runs) {
  std::vector<Held::Part> parts(1);
  for (const auto& choices : runs) {
    std::vector<Held::Part> longer;
    for (const auto& part : parts) {
      int64_t at = 0;
      for (const Run& run : choices) {
        auto next = part;
        next.box.offsets.push_back(run.begin);
        next.box.sizes.push_back(run.end - run.begin);
        next.at.push_back(at);
        at += run.end - run.begin;
        longer.push_back(std::move(next));
      }
    }
    parts = std::move(longer);
  }
  return parts;
}

}  // namespace

std::vector<Box> Held::boxes() const {
  std::vector<Box> boxes;
  for (const auto& part : parts) boxes.push_back(part.box);
  return boxes;
}

at::Tensor Held::view(const Part& part, const Box& what) const {
  if (what.numel() == 0) return local.new_empty(what.sizes);  // a piece of nothing may have other sizes
  auto view = local;
  for (size_t d = 0; d < what.sizes.size(); d++)
    view = view.narrow(static_cast<int64_t>(d), part.at[d] + what.offsets[d] - part.box.offsets[d], what.sizes[d]);
  return view;
}

Held held(const std::string& name, const at::Tensor& tensor) {
  TESSERA_CHECK(!tensor.is_meta(), UsageError, "'", name, "' ", tensor.sizes(),
                " is on the meta device and has no values; give the module memory first");
  Held held{.local = tensor.detach(), .sizes = Sizes(tensor.sizes().begin(), tensor.sizes().end()), .parts = {}};
  const TensorSpec* spec = is_dtensor(tensor) ? &DTensor(tensor).spec() : nullptr;
  if (spec) {
    TESSERA_CHECK(!spec->has_partial(), UsageError, "'", name, "' is ", spec->describe(),
                  ": a sum that is not yet taken has no value to keep; redistribute it first");
    held.local = detail::local_of(tensor).detach();
  }
  if (tensor.numel() == 0) {
    held.parts.push_back({Box::whole(tensor.sizes()), Sizes(tensor.sizes().size(), 0)});
    return held;
  }
  if (spec && !spec->mesh.get_coordinate()) return held;  // this rank is not in the mesh
  std::vector<Runs> runs;
  for (int64_t d = 0; d < tensor.dim(); d++) runs.push_back(spec ? spec->runs(d) : Runs{{0, tensor.size(d)}});
  held.parts = parts_of(runs);
  return held;
}

}  // namespace tessera::dcp
