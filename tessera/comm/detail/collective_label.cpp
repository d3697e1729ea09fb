#include "tessera/comm/detail/collective_label.h"

namespace tessera::comm {
namespace {

thread_local constinit const CollectiveLabel* innermost = nullptr;

}  // namespace

CollectiveLabel::CollectiveLabel(const char* name, int32_t number) : name_(name), number_(number), outer_(innermost) {
  innermost = this;
}
CollectiveLabel::~CollectiveLabel() { innermost = outer_; }
const CollectiveLabel* CollectiveLabel::current() { return innermost; }

}  // namespace tessera::comm
