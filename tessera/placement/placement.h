#pragma once
#include "tessera/base/reduce_op.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

namespace tessera {

// How a tensor lies along one mesh axis of n ranks. A small value: compare, hash, print, parse.
//
//   R            whole on every rank
//   S(d)         dim d cut in n pieces, as at::chunk cuts: ceil(size/n) each, the last ones shorter or empty
//   S(d,b)       the same, but cuts fall only on multiples of b (heads; rows of a flattened dim)
//   SS(d,k)      strided: dim d is first cut in k pieces and each of those in n; rank i has the i-th part of each
//   P(op)        every rank has a term; the value is their reduction: sum, avg, product, max, min
//   P(norm,p)    every rank has the p-norm of its elements; the value is the p-norm of those
//   P(mask)      one rank has each element, the others have zero there; reduces like a sum
//
// S(d), S(d,b) and SS(d,k) are three ways to cut; a rule row that says S(d) holds for every way.
struct Placement {
  enum class Kind : uint8_t { Replicate, Shard, StridedShard, Partial, NormPartial, MaskPartial };

  Kind kind = Kind::Replicate;
  int8_t dim = 0;               // Shard, StridedShard
  ReduceOp op = ReduceOp::Sum;  // Partial
  int64_t factor = 1;           // Shard: block size; StridedShard: pieces cut before this axis
  double norm = 0;              // NormPartial: p, which may be infinite

  bool is_replicate() const { return kind == Kind::Replicate; }
  bool is_sharded() const { return kind == Kind::Shard || kind == Kind::StridedShard; }
  bool is_sharded(int64_t d) const { return is_sharded() && dim == d; }
  bool is_shard() const { return kind == Kind::Shard; }  // in the sense of PyTorch: not a strided one
  bool is_shard(int64_t d) const { return is_shard() && dim == d; }
  bool is_partial() const { return kind >= Kind::Partial; }  // of any kind
  bool is_partial(ReduceOp o) const { return kind == Kind::Partial && op == o; }

  Placement with_dim(int64_t d) const;  // the same way of cutting, another dim
  bool operator==(const Placement&) const = default;
  uint64_t hash() const;
};
static_assert(sizeof(Placement) <= 24);

Placement Replicate();
Placement Shard(int64_t dim, int64_t block = 1);
Placement StridedShard(int64_t dim, int64_t split_factor);
Placement Partial(ReduceOp op = ReduceOp::Sum);
Placement NormPartial(double p);
Placement MaskPartial();

using Placements = c10::SmallVector<Placement, 4>;  // one a mesh axis
using PlacementsRef = c10::ArrayRef<Placement>;

std::string to_string(const Placement& p);
std::string to_string(PlacementsRef ps);  // "[S(0), R]"
std::ostream& operator<<(std::ostream& out, const Placement& p);
Placement parse_placement(std::string_view text);    // throws UsageError that shows the forms above
Placements parse_placements(std::string_view text);  // "[S(0), R]", "S(0),R"

// Negative dims counted from the end; throws UsageError for a dim the tensor does not have, a block or factor < 1.
Placements normalize(PlacementsRef placements, int64_t ndim);

}  // namespace tessera
