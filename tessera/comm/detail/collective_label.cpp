#include "tessera/comm/detail/collective_label.h"

namespace tessera::comm {
namespace {

thread_local constinit const Label* innermost = nullptr;

}  // namespace

Label::Label(const char* name, int32_t number) : name_(name), number_(number), outer_(innermost) { innermost = this; }
Label::~Label() { innermost = outer_; }
const Label* Label::current() { return innermost; }

}  // namespace tessera::comm
