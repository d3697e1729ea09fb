#include "tessera/placement/detail/tensor_spec.h"

#include "tessera/base/error.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

// A 2x2 mesh on the rank at (1, 0), without communication.
DeviceMesh small_mesh() {
  auto state = c10::make_intrusive<detail::MeshState>();
  state->device_type = "cpu";
  state->shape = {2, 2};
  state->ranks = {0, 1, 2, 3};
  state->names = {"dp", "tp"};
  state->coordinate = {1, 0};
  return DeviceMesh(std::move(state));
}

SpecRef make(const DeviceMesh& mesh, Placements placements, Sizes sizes, c10::ScalarType dtype = c10::kFloat) {
  return intern(mesh, placements, sizes, tessera::contiguous_strides(sizes), dtype, c10::kCPU);
}

TEST(TensorSpec, EqualSpecsAreOneObject) {
  auto mesh = small_mesh();
  auto a = make(mesh, {Shard(0), Replicate()}, {5, 4});
  EXPECT_EQ(a, make(mesh, {Shard(0), Replicate()}, {5, 4}));
  EXPECT_EQ(a, with_placements(*with_placements(*a, Placements{Partial(), Replicate()}), a->placements));
  EXPECT_NE(a, make(mesh, {Shard(0), Shard(1)}, {5, 4}));
  EXPECT_NE(a, make(mesh, {Shard(0), Replicate()}, {5, 5}));
  EXPECT_NE(a, make(mesh, {Shard(0), Replicate()}, {5, 4}, c10::kDouble));
  EXPECT_NE(a, intern(mesh, a->placements, a->sizes, {1, 5}, c10::kFloat, c10::kCPU));
}

TEST(TensorSpec, LocalSizesAndRanges) {
  auto spec = make(small_mesh(), {Shard(0), Shard(1)}, {5, 4});
  EXPECT_EQ(spec->local_sizes, (Sizes{2, 2}));
  EXPECT_EQ(spec->local_ranges(0), (IndexRanges{{3, 5}}));
  EXPECT_EQ(spec->local_ranges(1), (IndexRanges{{0, 2}}));
  EXPECT_EQ(spec->numel(), 20);
  EXPECT_EQ(spec->local_bytes(), 16);
  EXPECT_FALSE(spec->has_partial());
  EXPECT_TRUE(make(small_mesh(), {MaskPartial(), Replicate()}, {5})->has_partial());
  EXPECT_EQ(spec->describe(), "f32[5, 4][S(0), S(1)] on mesh(dp=2,tp=2)");
}

TEST(TensorSpec, InvalidPlacementsThrow) {
  auto mesh = small_mesh();
  EXPECT_THROW(make(mesh, {Shard(0)}, {4}), UsageError);
  EXPECT_THROW(make(mesh, {Shard(1), Replicate()}, {4}), UsageError);
  EXPECT_THROW(make(mesh, {Shard(-1), Replicate()}, {4}), UsageError);
  EXPECT_THROW(make(DeviceMesh(), {}, {4}), UsageError);
}

TEST(TensorSpec, SpecTableIsWeakAndBounded) {
  c10::weak_intrusive_ptr<detail::MeshState> watched(c10::make_intrusive<detail::MeshState>());
  {
    auto mesh = small_mesh();
    watched = c10::weak_intrusive_ptr<detail::MeshState>(mesh.state_ptr());
    auto kept = make(mesh, {Shard(0), Replicate()}, {5, 4});
    for (int64_t i = 0; i < 10'000; i++) make(mesh, {Shard(0), Replicate()}, {i, 4});
    EXPECT_LE(interned_count(mesh), 66u);
    EXPECT_EQ(kept, make(mesh, {Shard(0), Replicate()}, {5, 4}));
  }
  EXPECT_TRUE(watched.expired());
}

TEST(TensorSpec, PrototypeHasTheGlobalGeometryAndNoStorage) {
  auto spec = make(small_mesh(), {Shard(0), Replicate()}, {5, 4});
  auto impl = c10::make_intrusive<DTensorImpl>(dtensor_keys(c10::kCPU), caffe2::TypeMeta::Make<float>(), c10::kCPU);
  impl->copy_geometry(*spec->prototype);
  at::Tensor tensor((c10::intrusive_ptr<c10::TensorImpl>(impl)));
  EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{5, 4}));
  EXPECT_EQ(tensor.strides(), (at::IntArrayRef{4, 1}));
  EXPECT_EQ(tensor.numel(), 20);
  EXPECT_TRUE(tensor.is_contiguous());
  EXPECT_TRUE(tensor.key_set().has(c10::DispatchKey::PrivateUse3));
  EXPECT_TRUE(tensor.key_set().has(c10::DispatchKey::AutogradPrivateUse3));
  EXPECT_TRUE(tensor.key_set().has(c10::DispatchKey::AutocastCPU));
  EXPECT_FALSE(tensor.key_set().has(c10::DispatchKey::CPU));
  EXPECT_THROW(tensor.storage(), c10::Error);
  auto channels_last = intern(small_mesh(), spec->placements, {2, 3, 4, 5}, {60, 1, 15, 3}, c10::kFloat, c10::kCPU);
  EXPECT_TRUE(channels_last->prototype->is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_FALSE(channels_last->prototype->is_contiguous());
}

TEST(Strides, EqualThoseOfLibTorch) {
  for (const Sizes& sizes :
       {Sizes{}, Sizes{0}, Sizes{3}, Sizes{2, 0, 3}, Sizes{4, 5, 6}, Sizes{0, 0}, Sizes{1, 7, 1}}) {
    auto dense = at::empty(sizes);
    EXPECT_EQ(at::IntArrayRef(tessera::contiguous_strides(sizes)), dense.strides()) << dense.sizes();
  }
  auto turned = at::empty({4, 5, 6}).permute({2, 0, 1});
  EXPECT_EQ(at::IntArrayRef(strides_in_order_of(turned.sizes(), turned.strides())), turned.strides());
  auto part = turned.slice(0, 0, 2);  // not dense; the result is dense in the same order
  EXPECT_EQ(at::IntArrayRef(strides_in_order_of(part.sizes(), part.strides())), at::empty_like(part).strides());
  EXPECT_EQ(strides_in_order_of({2, 3}, {1, 100}), (Sizes{1, 2}));
}

}  // namespace
}  // namespace tessera
