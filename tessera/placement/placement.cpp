#include "tessera/placement/placement.h"

#include "tessera/base/detail/hash.h"
#include "tessera/base/error.h"

#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <ostream>

namespace tessera {

Placement Replicate() { return {}; }

Placement Shard(int64_t dim, int64_t block) {
  TESSERA_CHECK(std::abs(dim) < 64, UsageError, "Shard(", dim, "): a tensor has fewer than 64 dims");
  TESSERA_CHECK(block >= 1, UsageError, "Shard(", dim, ", ", block, "): the block size must be at least 1");
  return {.kind = Placement::Kind::Shard, .dim = static_cast<int8_t>(dim), .factor = block};
}

Placement StridedShard(int64_t dim, int64_t split_factor, int64_t block) {
  TESSERA_CHECK(std::abs(dim) < 64, UsageError, "StridedShard(", dim, "): a tensor has fewer than 64 dims");
  TESSERA_CHECK(split_factor >= 1, UsageError, "StridedShard(", dim, ", ", split_factor,
                "): the split factor is the number of parts that ",
                "are split before this axis; it must be at least 1");
  TESSERA_CHECK(block >= 1 && block <= std::numeric_limits<int32_t>::max(), UsageError, "StridedShard(", dim, ", ",
                split_factor, ", ", block, "): the block size must be at least 1 and below 2^31");
  return {.kind = Placement::Kind::StridedShard,
          .dim = static_cast<int8_t>(dim),
          .block = static_cast<int32_t>(block),
          .factor = split_factor};
}

Placement Partial(ReduceOp op) { return {.kind = Placement::Kind::Partial, .op = op}; }

Placement NormPartial(double p) {
  TESSERA_CHECK(p != 0 && !std::isnan(p), UsageError, "NormPartial(", p,
                "): the norms of local tensors cannot be combined for this p; write a p that is not 0");
  return {.kind = Placement::Kind::NormPartial, .norm = p};
}

Placement MaskPartial() { return {.kind = Placement::Kind::MaskPartial}; }

Placement Placement::with_dim(int64_t d) const {
  auto moved = *this;
  moved.dim = static_cast<int8_t>(d);
  return moved;
}

uint64_t Placement::hash() const {
  uint64_t h = hash_combine(0, static_cast<uint64_t>(kind) | static_cast<uint64_t>(static_cast<uint8_t>(dim)) << 8 |
                                   static_cast<uint64_t>(op) << 16 | static_cast<uint64_t>(block) << 32);
  h = hash_combine(h, static_cast<uint64_t>(factor));
  return hash_combine(h, std::bit_cast<uint64_t>(norm + 0.0));  // + 0.0: -0.0 == 0.0
}

std::string to_string(const Placement& p) {
  switch (p.kind) {
    case Placement::Kind::Replicate:
      return "R";
    case Placement::Kind::Shard:
      return p.factor == 1 ? c10::str("S(", int{p.dim}, ")") : c10::str("S(", int{p.dim}, ",", p.factor, ")");
    case Placement::Kind::StridedShard:
      return p.block == 1 ? c10::str("SS(", int{p.dim}, ",", p.factor, ")")
                          : c10::str("SS(", int{p.dim}, ",", p.factor, ",", p.block, ")");
    case Placement::Kind::Partial:
      return c10::str("P(", p.op, ")");
    case Placement::Kind::NormPartial: {
      std::array<char, 32> digits;  // the shortest text that reads back as the same number
      auto end = std::to_chars(digits.data(), digits.data() + digits.size(), p.norm).ptr;
      return c10::str("P(norm,", std::string_view(digits.data(), static_cast<size_t>(end - digits.data())), ")");
    }
    case Placement::Kind::MaskPartial:
      return "P(mask)";
  }
  TESSERA_FAIL(InternalError, "placement of kind ", static_cast<int>(p.kind));
}

std::string to_string(PlacementsRef ps) {
  std::string text = "[";
  for (size_t i = 0; i < ps.size(); i++) text += (i ? ", " : "") + to_string(ps[i]);
  return text + "]";
}

std::ostream& operator<<(std::ostream& out, const Placement& p) { return out << to_string(p); }

namespace {

std::string_view trim(std::string_view s) {
  while (!s.empty() && s.front() == ' ') s.remove_prefix(1);
  while (!s.empty() && s.back() == ' ') s.remove_suffix(1);
  return s;
}

[[noreturn]] void refuse(std::string_view text) {
  TESSERA_FAIL(UsageError, "'", text,
               "' is not a placement; write R, S(dim), S(dim,block), SS(dim,factor), SS(dim,factor,block), P(sum), "
               "P(avg), P(product), P(max), P(min), P(norm,p) or P(mask)");
}

template <class Number>
bool read_number(std::string_view s, Number& out) {
  auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), out);
  return error == std::errc() && end == s.data() + s.size();
}

}  // namespace

Placement parse_placement(std::string_view text) {
  auto s = trim(text);
  if (s == "R") return Replicate();
  if (s == "P") return Partial();
  auto open = s.find('(');
  if (open == s.npos || s.back() != ')') refuse(text);
  auto head = s.substr(0, open);
  auto inside = s.substr(open + 1, s.size() - open - 2);
  auto comma = inside.find(',');
  auto first = trim(inside.substr(0, comma));
  bool has_second = comma != inside.npos;
  auto second = has_second ? trim(inside.substr(comma + 1)) : std::string_view();

  if (head == "P" && first == "norm" && has_second) {
    double p = 0;
    if (!read_number(second, p) || p == 0 || std::isnan(p)) refuse(text);
    return NormPartial(p);
  }
  if (head == "P" && !has_second) {
    if (first == "mask") return MaskPartial();
    for (auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min})
      if (first == to_string(op)) return Partial(op);
    refuse(text);
  }
  int64_t dim = 0, factor = 1;
  int32_t block = 1;
  const auto second_comma = second.find(',');
  if (head == "SS" && second_comma != second.npos) {
    if (!read_number(trim(second.substr(second_comma + 1)), block) || block < 1) refuse(text);
    second = trim(second.substr(0, second_comma));
  }
  if (!read_number(first, dim) || dim <= -64 || dim >= 64) refuse(text);
  if (has_second && (!read_number(second, factor) || factor < 1)) refuse(text);
  if (head == "S") return Shard(dim, factor);
  if (head == "SS" && has_second) return StridedShard(dim, factor, block);
  refuse(text);
}

Placements parse_placements(std::string_view text) {
  auto s = trim(text);
  bool bracketed = !s.empty() && (s.front() == '[' || s.back() == ']');
  if (bracketed) {
    if (s.size() < 2 || s.front() != '[' || s.back() != ']') refuse(text);
    s = trim(s.substr(1, s.size() - 2));
    if (s.empty()) return {};
  }
  Placements found;
  int depth = 0;  // commas inside parentheses belong to a placement
  size_t begin = 0;
  for (size_t i = 0; i <= s.size(); i++) {
    if (i == s.size() || (s[i] == ',' && depth == 0)) {
      found.push_back(parse_placement(s.substr(begin, i - begin)));
      begin = i + 1;
    } else {
      depth += s[i] == '(' ? 1 : s[i] == ')' ? -1 : 0;
    }
  }
  return found;
}

Placements normalize(PlacementsRef placements, int64_t ndim) {
  Placements result(placements.begin(), placements.end());
  for (auto& p : result) {
    if (!p.is_sharded()) continue;
    TESSERA_CHECK(p.dim >= -ndim && p.dim < ndim, UsageError, p, " of a tensor with ", ndim, " dims; dims are ", -ndim,
                  " to ", ndim - 1);
    TESSERA_CHECK(p.factor >= 1 && p.block >= 1, UsageError, p, ": block or factor must be at least 1");
    if (p.dim < 0) p.dim = static_cast<int8_t>(p.dim + ndim);
  }
  return result;
}

}  // namespace tessera
