#pragma once
#include <cstdint>

namespace tessera::comm {

// While alive, says what the collectives that this thread posts are about. The name shows in records and errors. The
// number is part of what the ranks must agree on: two ranks that post the same kind of collective for different steps
// get an error instead of each other's values (backends threads and shm).
// Example:  comm::Label label("pass 12, bucket 0", 12 * 4096);
class Label {
 public:
  Label(const char* name, int32_t number);  // the name must outlive the collectives
  ~Label();
  Label(const Label&) = delete;

  const char* name() const { return name_; }
  int32_t number() const { return number_; }
  static const Label* current();  // the innermost one of this thread; null if there is none

 private:
  const char* name_;
  int32_t number_;
  const Label* outer_;
};

}  // namespace tessera::comm
