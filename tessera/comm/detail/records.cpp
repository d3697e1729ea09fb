#include "tessera/comm/detail/records.h"

#include <array>
#include <ostream>

namespace tessera::comm {
namespace {

struct KindRow {
  const char* functional;
  const char* c10d;
  bool counted;
};
// In the order of the enum. Names are those of the ops that PyTorch's CommDebugMode counts. It does not count send,
// recv.
constexpr std::array kKinds = {
    KindRow{"all_reduce", "allreduce_", true},
    KindRow{"all_reduce_coalesced", "allreduce_coalesced_", true},
    KindRow{"all_gather_into_tensor", "_allgather_base_", true},
    KindRow{"all_gather", "allgather_", true},
    KindRow{"all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced_", true},
    KindRow{"reduce_scatter_tensor", "_reduce_scatter_base_", true},
    KindRow{"reduce_scatter", "reduce_scatter_", true},
    KindRow{"reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced_", true},
    KindRow{"broadcast", "broadcast_", true},
    KindRow{"scatter", "scatter_", true},
    KindRow{"gather", "gather_", true},
    KindRow{"reduce", "reduce_", true},
    KindRow{"all_to_all_single", "alltoall_base_", true},
    KindRow{"all_to_all", "alltoall_", true},
    KindRow{"send", "send", false},
    KindRow{"recv", "recv_", false},
    KindRow{"barrier", "barrier", false},
    KindRow{"wait_tensor", "wait_tensor", false},
};
static_assert(kKinds.size() == static_cast<size_t>(CommKind::Count));

const KindRow& row(CommKind kind) { return kKinds[static_cast<size_t>(kind)]; }

}  // namespace

const char* kind_name(CommKind kind, Family family) {
  return family == Family::Functional ? row(kind).functional : row(kind).c10d;
}
bool is_counted(CommKind kind) { return row(kind).counted; }
std::ostream& operator<<(std::ostream& out, CommKind kind) { return out << row(kind).functional; }

std::ostream& operator<<(std::ostream& out, const Record& record) {
  out << record.name() << " #" << record.sequence << " on '" << record.group << "', " << record.bytes << " bytes";
  if (record.dtype != c10::ScalarType::Undefined) out << " of " << c10::toString(record.dtype);
  if (!record.tensor_name.empty()) out << ", " << record.tensor_name;
  return out;
}

thread_local ObserverScope* ObserverScope::innermost = nullptr;

ObserverScope::ObserverScope(Observer* observer) : observer_(observer), outer_(innermost) { innermost = this; }
ObserverScope::~ObserverScope() { innermost = outer_; }

bool observed() { return ObserverScope::innermost != nullptr; }

void notify_post(const Record& record) {
  for (auto* scope = ObserverScope::innermost; scope; scope = scope->outer_) scope->observer_->on_post(record);
}
void notify_done(const Record& record) {
  for (auto* scope = ObserverScope::innermost; scope; scope = scope->outer_) scope->observer_->on_done(record);
}

}  // namespace tessera::comm
