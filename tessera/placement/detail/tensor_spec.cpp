#define AT_PER_OPERATOR_HEADERS  // ExpandUtils.h would otherwise include every op
#include "tessera/placement/detail/tensor_spec.h"

#include "tessera/base/detail/hash.h"
#include "tessera/base/error.h"

#include <ATen/ExpandUtils.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <unordered_map>

namespace tessera {
namespace {

uint64_t hash_of(PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype,
                 c10::Device device) {
  uint64_t h = hash_combine(0, static_cast<uint64_t>(dtype) | static_cast<uint64_t>(sizes.size()) << 8);
  h = hash_combine(h, static_cast<uint64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index()));
  for (const auto& p : placements) h = hash_combine(h, p.hash());
  for (auto size : sizes) h = hash_combine(h, static_cast<uint64_t>(size));
  for (auto stride : strides) h = hash_combine(h, static_cast<uint64_t>(stride));
  return h;
}

// The specs of one mesh. References are weak: a spec lives as long as tensors and decisions use it.
class SpecTable final : public detail::MeshAttachment {
 public:
  // Returns the live spec with this hash for which same(spec) is true, or make().
  template <class Same, class Make>
  SpecRef find_or_make(uint64_t hash, Same same, Make make) {
    std::lock_guard lock(mutex_);
    auto [begin, end] = specs_.equal_range(hash);
    for (auto it = begin; it != end; ++it)
      if (auto spec = it->second.lock(); spec && same(*spec)) return spec;
    if (specs_.size() >= sweep_at_) sweep();
    auto spec = make();
    specs_.emplace(hash, Weak(spec));
    return spec;
  }

  void clear() override {
    std::lock_guard lock(mutex_);
    specs_.clear();
  }

  size_t size() {
    std::lock_guard lock(mutex_);
    return specs_.size();
  }

 private:
  using Weak = c10::weak_intrusive_ptr<TensorSpec>;

  // Removes dead entries. Called when the table has twice as many entries as were live the last time.
  void sweep() {
    std::erase_if(specs_, [](const auto& entry) { return entry.second.expired(); });
    sweep_at_ = std::max<size_t>(64, 2 * specs_.size());
  }

  std::mutex mutex_;
  std::unordered_multimap<uint64_t, Weak> specs_;
  size_t sweep_at_ = 64;
};

SpecTable& specs_of(const DeviceMesh& mesh) {
  static std::mutex making;
  std::lock_guard lock(making);
  auto& slot = mesh.state()->attachments[static_cast<size_t>(detail::MeshSlot::Specs)];
  if (!slot) slot = std::make_unique<SpecTable>();
  return static_cast<SpecTable&>(*slot);
}

void check(const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  TESSERA_CHECK(mesh, UsageError, "a distributed tensor needs a mesh; this one is empty");
  TESSERA_CHECK(static_cast<int64_t>(placements.size()) == mesh.ndim(), UsageError, "mesh has ", mesh.ndim(),
                " axes but placements are ", to_string(placements), "; give one placement per mesh axis");
  TESSERA_CHECK(sizes.size() == strides.size(), InternalError, "sizes ", sizes, " with strides ", strides);
  for (const auto& p : placements) {
    if (!p.is_sharded()) continue;
    TESSERA_CHECK(p.dim >= 0 && p.dim < static_cast<int64_t>(sizes.size()), UsageError, to_string(placements),
                  " of a tensor of sizes ", sizes, ": it has no dim ", int{p.dim});
  }
}

}  // namespace

TensorSpec::TensorSpec(DeviceMesh mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                       c10::ScalarType dtype, c10::Device device, uint64_t hash)
    : mesh(std::move(mesh)),
      placements(placements.begin(), placements.end()),
      sizes(sizes.begin(), sizes.end()),
      strides(strides.begin(), strides.end()),
      dtype(dtype),
      device(device),
      hash(hash) {
  const auto& state = *this->mesh.state();
  if (state.coordinate.empty())  // this rank is not in the mesh and has no local tensor
    local_sizes.assign(sizes.size(), 0);
  else
    local_sizes = tessera::local_sizes(placements, state.shape, state.coordinate, sizes);
  prototype = c10::make_intrusive<DTensorImpl>(dtensor_keys(device), c10::scalarTypeToTypeMeta(dtype), device);
  prototype->set_sizes_and_strides(sizes, strides);
  prototype->set_storage_access_should_throw();
}

void TensorSpec::release_resources() {
  mesh = {};
  prototype.reset();
}

int64_t TensorSpec::numel() const { return prototype->numel(); }

int64_t TensorSpec::local_bytes() const {
  return c10::multiply_integers(local_sizes) * static_cast<int64_t>(c10::elementSize(dtype));
}

IndexRanges TensorSpec::local_ranges(int64_t dim) const {
  const auto& state = *mesh.state();
  if (state.coordinate.empty()) return {};
  return tessera::local_ranges(placements, state.shape, state.coordinate, dim, sizes[dim]);
}

const std::vector<int64_t>& TensorSpec::range_list() const {
  std::call_once(range_list_made_, [this] {
    if (std::none_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_sharded(); })) return;
    for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); d++) {
      const auto ranges = local_ranges(d);
      range_list_.push_back(static_cast<int64_t>(ranges.size()));
      for (const auto& [begin, end] : ranges) range_list_.insert(range_list_.end(), {begin, end});
    }
  });
  return range_list_;
}

bool TensorSpec::has_partial() const {
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
}

namespace {

// "f32" for common types; other types keep LibTorch's name.
std::string short_name(c10::ScalarType dtype) {
  constexpr std::pair<c10::ScalarType, const char*> kNames[] = {
      {c10::ScalarType::Float, "f32"},     {c10::ScalarType::Double, "f64"}, {c10::ScalarType::Half, "f16"},
      {c10::ScalarType::BFloat16, "bf16"}, {c10::ScalarType::Long, "i64"},   {c10::ScalarType::Int, "i32"},
      {c10::ScalarType::Bool, "bool"},
  };
  for (auto [type, name] : kNames)
    if (type == dtype) return name;
  return c10::toString(dtype);
}

}  // namespace

std::string TensorSpec::brief() const {
  return c10::str(short_name(dtype), c10::IntArrayRef(sizes), to_string(placements));
}

std::string TensorSpec::describe() const { return c10::str(brief(), " on mesh(", mesh, ")"); }

SpecRef intern(const DeviceMesh& mesh, PlacementsRef given, c10::IntArrayRef sizes, c10::IntArrayRef strides,
               c10::ScalarType dtype, c10::Device device) {
  check(mesh, given, sizes, strides);
  const auto placements = drop_redundant_blocks(given, mesh.shape(), sizes);
  auto hash = hash_of(placements, sizes, strides, dtype, device);
  auto same = [&](const TensorSpec& spec) {
    return spec.dtype == dtype && spec.device == device &&
           PlacementsRef(spec.placements) == PlacementsRef(placements) && c10::IntArrayRef(spec.sizes) == sizes &&
           c10::IntArrayRef(spec.strides) == strides;
  };
  auto make = [&] { return c10::make_intrusive<TensorSpec>(mesh, placements, sizes, strides, dtype, device, hash); };
  return specs_of(mesh).find_or_make(hash, same, make);
}

size_t interned_count(const DeviceMesh& mesh) { return specs_of(mesh).size(); }

SpecRef with_placements(const TensorSpec& spec, PlacementsRef placements) {
  return intern(spec.mesh, placements, spec.sizes, spec.strides, spec.dtype, spec.device);
}

Sizes contiguous_strides(c10::IntArrayRef sizes) {
  auto strides = c10::contiguous_strides(sizes);
  return Sizes(strides.begin(), strides.end());
}

Sizes strides_in_order_of(c10::IntArrayRef sizes, c10::IntArrayRef like) {
  auto strides = at::infer_dense_strides(sizes, like);
  return Sizes(strides.begin(), strides.end());
}

c10::DispatchKeySet dtensor_keys(c10::Device device) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse3);
  if (device.is_cpu()) return keys.add(c10::DispatchKey::AutocastCPU);
  if (device.is_cuda()) return keys.add(c10::DispatchKey::AutocastCUDA);
  return keys;
}

}  // namespace tessera
