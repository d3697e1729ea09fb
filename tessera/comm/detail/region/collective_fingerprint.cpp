#include "tessera/comm/detail/region/collective_fingerprint.h"

#include "tessera/comm/detail/current_collective.h"

#include <c10/util/StringUtil.h>

#include <cstring>

namespace tessera::comm::region {

CollectiveFingerprint fingerprint_of(CommKind kind, c10::ScalarType dtype, uint64_t call) {
  CollectiveFingerprint s{};
  s.sequence = call;
  s.kind = static_cast<uint8_t>(kind);
  s.family = static_cast<uint8_t>(Family::C10d);
  s.dtype = static_cast<uint8_t>(dtype);
  s.root = -1;
  if (const auto* current = detail::current_collective) {
    s.sequence = current->sequence;
    s.kind = static_cast<uint8_t>(current->kind);
    s.family = static_cast<uint8_t>(current->family);
    s.tag = current->number;
    std::strncpy(s.tensor_name, current->tensor_name, sizeof(s.tensor_name) - 1);
  }
  return s;
}

std::string describe(const CollectiveFingerprint& s) {
  std::string text =
      c10::str(kind_name(static_cast<CommKind>(s.kind), static_cast<Family>(s.family)), " #", s.sequence);
  if (s.tensor_name[0]) text += c10::str(" ('", s.tensor_name, "')");
  if (s.dtype != static_cast<uint8_t>(c10::ScalarType::Undefined))
    text += c10::str(" of ", static_cast<c10::ScalarType>(s.dtype));
  return text;
}

std::string difference(const CollectiveFingerprint& mine, const CollectiveFingerprint& theirs, int64_t my_rank,
                       int64_t their_rank) {
  const bool same_kind = theirs.kind == mine.kind && theirs.dtype == mine.dtype && theirs.root == mine.root;
  if (same_kind && theirs.reduce_op == mine.reduce_op && theirs.sequence == mine.sequence && theirs.tag == mine.tag)
    return "";
  const auto posted = [](const CollectiveFingerprint& s, int64_t rank) {
    return c10::str("rank ", rank, " posted ", describe(s), s.root >= 0 ? c10::str(" with root ", s.root) : "");
  };
  return c10::str(posted(mine, my_rank), ", ", posted(theirs, their_rank),
                  same_kind ? " with another reduction or number" : "");
}

}  // namespace tessera::comm::region
