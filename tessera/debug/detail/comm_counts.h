#pragma once
#include "tessera/comm/detail/records.h"

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <map>
#include <string>
#include <string_view>

namespace tessera {

// The name of a collective in PyTorch's CommDebugMode: "c10d_functional.all_reduce" for the collectives of
// redistribution, "c10d.allreduce_" for the in-place collectives of c10d.
std::string comm_name(comm::CommKind kind, comm::Family family = comm::Family::Functional);

// The number of collectives by name: a value with == and <<. Names with count 0 are not listed.
// Example:  EXPECT_EQ(mode.get_comm_counts(), (CommCounts{{"c10d_functional.all_reduce", 2}}));
class CommCounts {
 public:
  using Map = std::map<std::string, int64_t, std::less<>>;

  CommCounts() = default;
  CommCounts(std::initializer_list<Map::value_type> counts);

  int64_t operator[](std::string_view name) const;  // throws UsageError for an unknown name
  int64_t of(comm::CommKind kind, comm::Family family = comm::Family::Functional) const;
  int64_t total() const;
  const Map& by_name() const { return counts_; }

  void add(comm::CommKind kind, comm::Family family);
  bool operator==(const CommCounts&) const = default;

 private:
  Map counts_;  // no value is 0
};
std::ostream& operator<<(std::ostream& out, const CommCounts& counts);  // {c10d_functional.all_reduce: 2}

}  // namespace tessera
