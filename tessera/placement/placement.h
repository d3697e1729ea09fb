#pragma once
#include "tessera/base/reduce_op.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>

namespace tessera {

// The placement of a tensor along one mesh axis of n ranks (PyTorch: Placement). A small value with ==, hash, print and
// parse.
//
//   R            replicated: every rank has the full tensor
//   S(d)         dim d is sharded as at::chunk splits it: ceil(size/n) each, the last shards are shorter or empty
//   S(d,b)       as S(d), but shards begin only at multiples of b (attention heads; rows of a flattened dim)
//   SS(d,k)      strided: dim d is first split in k parts, and each part in n; rank i has the i-th split of each part
//   SS(d,k,b)    as SS(d,k), but splits begin only at multiples of b in their part (heads of a fused q, k, v)
//   P(op)        partial: the value is the reduction of the local tensors of all ranks: sum, avg, product, max, min
//   P(norm,p)    partial: each rank has the p-norm of its elements; the value is the p-norm of these norms
//   P(mask)      partial: one rank has each element, the others have zero there; it is reduced like a sum
//
// S(d), S(d,b), SS(d,k) and SS(d,k,b) are the ways to shard a dim. A sharding strategy that lists S(d) holds for all.
//
// Example:  Placements p = {Replicate(), Shard(0)};  // to_string(p) == "[R, S(0)]"
struct Placement {
  // Which of the forms above this is.
  enum class Kind : uint8_t { Replicate, Shard, StridedShard, Partial, NormPartial, MaskPartial };

  Kind kind = Kind::Replicate;  // which of the fields below apply
  int8_t dim = 0;               // Shard, StridedShard: the sharded dim
  ReduceOp op = ReduceOp::Sum;  // Partial: the reduction that gives the value
  int32_t block = 1;            // StridedShard: block size in each part
  int64_t factor = 1;           // Shard: block size; StridedShard: number of parts that are split before this axis
  double norm = 0;              // NormPartial: p, which may be infinite

  // True for R.
  bool is_replicate() const { return kind == Kind::Replicate; }
  // True for every way to shard: S(d), S(d,b), SS(d,k), SS(d,k,b); with an argument, only if it shards dim d.
  bool is_sharded() const { return kind == Kind::Shard || kind == Kind::StridedShard; }
  bool is_sharded(int64_t d) const { return is_sharded() && dim == d; }
  // True for S(d) and S(d,b), as in PyTorch: a strided shard does not count.
  bool is_shard() const { return kind == Kind::Shard; }
  bool is_shard(int64_t d) const { return is_shard() && dim == d; }
  // True for every kind of partial; with an argument, only for P(o).
  bool is_partial() const { return kind >= Kind::Partial; }
  bool is_partial(ReduceOp o) const { return kind == Kind::Partial && op == o; }

  Placement with_dim(int64_t d) const;  // shards dim d in the same way
  bool operator==(const Placement&) const = default;
  uint64_t hash() const;  // equal placements have equal hashes
};
static_assert(sizeof(Placement) <= 24);

// The placements by name, as in PyTorch. Shard, StridedShard and NormPartial throw UsageError for a dim, block, factor
// or p that no tensor can have.
Placement Replicate();
Placement Shard(int64_t dim, int64_t block = 1);
Placement StridedShard(int64_t dim, int64_t split_factor, int64_t block = 1);
Placement Partial(ReduceOp op = ReduceOp::Sum);
Placement NormPartial(double p);
Placement MaskPartial();

// One placement per mesh axis.
using Placements = c10::SmallVector<Placement, 4>;
using PlacementsRef = c10::ArrayRef<Placement>;

// The short form: "S(0)", "[S(0), R]". parse_placement() reads it back.
std::string to_string(const Placement& p);
std::string to_string(PlacementsRef ps);
std::ostream& operator<<(std::ostream& out, const Placement& p);

// Reads the short form: "S(0)"; "[S(0), R]" or "S(0),R". Throws UsageError that shows the forms above.
Placement parse_placement(std::string_view text);
Placements parse_placements(std::string_view text);

// Makes negative dims non-negative. Throws UsageError for a dim that the tensor does not have, or a block or factor
// below 1.
Placements normalize(PlacementsRef placements, int64_t ndim);

}  // namespace tessera
