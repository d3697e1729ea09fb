#include "tessera/debug/detail/comm_counts.h"

#include "tessera/base/error.h"

#include <ostream>
#include <sstream>

namespace tessera {
namespace {

using comm::CommKind;
using comm::Family;

template <class F>
void for_each_name(F f) {
  for (auto family : {Family::Functional, Family::C10d})
    for (int k = 0; k < static_cast<int>(CommKind::Count); k++)
      if (comm::is_counted(static_cast<CommKind>(k))) f(comm_name(static_cast<CommKind>(k), family));
}

// Rejects a misspelt name: its count would always be 0, and a test that expects 0 would pass.
void check_name(std::string_view name) {
  bool known = false;
  for_each_name([&](const std::string& n) { known |= n == name; });
  if (known) return;
  std::ostringstream names;
  for_each_name([&](const std::string& n) { names << "\n  " << n; });
  TESSERA_FAIL(UsageError, "'", name, "' is not the name of a counted collective; write one of:", names.str());
}

}  // namespace

std::string comm_name(CommKind kind, Family family) {
  return c10::str(family == Family::Functional ? "c10d_functional." : "c10d.", comm::kind_name(kind, family));
}

CommCounts::CommCounts(std::initializer_list<Map::value_type> counts) {
  for (const auto& [name, count] : counts) {
    check_name(name);
    if (count != 0) counts_[name] += count;
  }
}

int64_t CommCounts::operator[](std::string_view name) const {
  const auto found = counts_.find(name);
  if (found != counts_.end()) return found->second;
  check_name(name);
  return 0;
}

int64_t CommCounts::of(CommKind kind, Family family) const { return (*this)[comm_name(kind, family)]; }

int64_t CommCounts::total() const {
  int64_t total = 0;
  for (const auto& [name, count] : counts_) total += count;
  return total;
}

void CommCounts::add(CommKind kind, Family family) { counts_[comm_name(kind, family)]++; }

std::ostream& operator<<(std::ostream& out, const CommCounts& counts) {
  out << "{";
  const char* comma = "";
  for (const auto& [name, count] : counts.by_name()) {
    out << comma << name << ": " << count;
    comma = ", ";
  }
  return out << "}";
}

}  // namespace tessera
